"""Speculation: who drafts tokens, how many, and from which vocabulary."""
