"""The no-op engine in its own process: `python -m benchmarks.no_op_process FD`, in place of agentspec.engine.process.

The link between engine and server is that of `serve`: RemoteEngine starts this module instead of the real one.
"""

from __future__ import annotations

import sys

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine import process as engine_process
from agentspec.engine.link import EngineSetup
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import Progress
from benchmarks.no_op_engine import NoOpEngine


def load(config: EngineConfig, progress: Progress) -> tuple[NoOpEngine, EngineSetup]:
    """An engine without memory, for any config."""
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    nothing = EngineSetup(
        model_dir=None,
        device="none",
        dtype="none",
        num_rows=0,
        row_bytes=0,
        num_pages=0,
        page_bytes=0,
        host_bytes=0,
        block_tokens=0,
        graphs="none",
        draft_vocabulary="nothing",
    )
    return NoOpEngine(tokenizer), nothing


if __name__ == "__main__":
    sys.exit(engine_process.main(load))
