"""`python -m agentspec`: the same as the `agentspec` command."""

from __future__ import annotations

from agentspec.commands.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
