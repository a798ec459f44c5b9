"""Command-line agents of others, unmodified: how each is run against a server on this machine, and what it sends
there."""
