"""Speculation: the drafter, the number of drafts, and the vocabulary that they are chosen from."""
