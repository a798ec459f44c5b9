"""`agentspec serve` with the light engine: `python -m tests.chaos.light_serve serve --port 0 ...`. Everything else is
as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentspec.commands.cli import main
from agentspec.engine import remote as remote_engine

ENTRY: tuple[str, ...] = ("-m", "tests.chaos.light_engine")


class LightProcess(remote_engine.EngineProcess):
    def __init__(self, entry: Sequence[str] = ENTRY, options: Sequence[str] = ()) -> None:
        super().__init__(entry, options)


if __name__ == "__main__":
    remote_engine.EngineProcess = LightProcess  # type: ignore[misc]
    remote_engine.ENGINE_ENTRY = ENTRY
    sys.exit(main())
