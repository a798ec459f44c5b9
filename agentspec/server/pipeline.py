"""The text room as the server uses it: one bundle for a checkpoint that has a tokenizer.

Knows which parts belong together, and nothing of requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from agentspec.text.chat_template import ChatTemplate, Tools
from agentspec.text.prompt import PromptBuilder
from agentspec.text.segmenter import Segmenter
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import ToolSchemas
from agentspec.text.turn_memory import TurnMemory


@dataclass(frozen=True, slots=True)
class TextPipeline:
    """Tokenizer and, if the checkpoint has a chat template, what makes prompts of messages. One per served model: it remembers turns."""

    tokenizer: Tokenizer
    prompts: PromptBuilder | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a prompt is built: one at a time, off the event loop."""

    @classmethod
    def from_checkpoint(cls, tokenizer: Tokenizer | None, model_dir: Path | None) -> Self | None:
        """None without a tokenizer. Raises CheckpointError when the directory's chat template can't be used."""
        if tokenizer is None:
            return None
        template = None if model_dir is None else ChatTemplate.from_directory(model_dir)
        return cls(tokenizer, None if template is None else PromptBuilder(tokenizer, template, TurnMemory()))

    def segmenter(self, tools: Tools | None, *, reasoning_open: bool, has_form: bool = False) -> Segmenter:
        """Splits one answer. Tool calls are read only when the request has tools; `has_form`: its content has a form that was asked for."""
        assert self.prompts is not None
        schemas = None if tools is None else ToolSchemas(tools)
        return Segmenter(reasoning_open=reasoning_open, dialect=self.prompts.dialect, tools=schemas, has_form=has_form)
