"""The prefix cache: which prefixes are known, who owns which row and page, and what is evicted when memory is short.
Deals in ids; no torch."""
