"""Tool-call dialects: the formats in which models write calls. One module per dialect, behind one Protocol."""

from __future__ import annotations

from agentspec.text.tool_calls.hermes import HermesDialect
from agentspec.text.tool_calls.protocol import CALL_OPEN, CallParser, CallStatus, CallStep, Dialect
from agentspec.text.tool_calls.qwen3_coder import Qwen3CoderDialect
from agentspec.text.tool_calls.schemas import ToolSchemas

__all__ = ["DIALECTS", "CallParser", "CallStatus", "CallStep", "Dialect", "ToolSchemas", "detect_dialect"]

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Qwen3CoderDialect(), HermesDialect())}


def detect_dialect(template_source: str) -> str | None:
    """Return the name in DIALECTS of the dialect that a chat template shows; None when it shows no known dialect."""
    if "<function=" in template_source:
        return Qwen3CoderDialect.name
    if CALL_OPEN in template_source:
        return HermesDialect.name
    return None
