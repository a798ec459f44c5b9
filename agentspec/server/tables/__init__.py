"""What each field of each endpoint's body is to this server: the tables that bodies are read by, and that docs/api.md
is printed from."""
