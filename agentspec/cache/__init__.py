"""The prefix cache: known prefixes, ownership of state rows and KV pages, and eviction.
Works on ids; does not import torch."""
