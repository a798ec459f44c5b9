"""The public API. Each name is imported on first use: importing agentspec loads neither torch nor a server.

    from agentspec import AsyncEngine, EngineConfig

`Engine` and `AsyncEngine` run a model in this process. A request is a `Submit`; its answers are `TokensEvent` and
`FinishEvent`. Every error that they raise is an `AgentspecError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentspec.config import EngineConfig
    from agentspec.engine.in_process import AsyncEngine, Engine
    from agentspec.errors import AgentspecError
    from agentspec.types import SamplingParams
    from agentspec.wire import Abort, Event, FinishEvent, Grammar, ModelInfo, SpecStats, Submit, TokensEvent, Usage

DISTRIBUTION = "agentspec-engine"
"""Name of the distribution: `agentspec` on PyPI is another project."""

_HOMES = {
    "agentspec.config": ("EngineConfig",),
    "agentspec.engine.in_process": ("AsyncEngine", "Engine"),
    "agentspec.errors": ("AgentspecError",),
    "agentspec.types": ("SamplingParams",),
    "agentspec.wire": (
        "Abort",
        "Event",
        "FinishEvent",
        "Grammar",
        "ModelInfo",
        "SpecStats",
        "Submit",
        "TokensEvent",
        "Usage",
    ),
}

__all__ = [
    "Abort",
    "AgentspecError",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "Event",
    "FinishEvent",
    "Grammar",
    "ModelInfo",
    "SamplingParams",
    "SpecStats",
    "Submit",
    "TokensEvent",
    "Usage",
    "version",
]


def version() -> str:
    from importlib import metadata  # late: it imports the parts of a mail reader

    return metadata.version(DISTRIBUTION)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'agentspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
