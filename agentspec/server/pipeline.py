"""The text room as the server uses it: one bundle for a checkpoint that has a tokenizer.

Knows which parts belong together, and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from agentspec.errors import ConfigError
from agentspec.text.assets import named_tokens, read_object
from agentspec.text.chat_template import ChatTemplate, Tools
from agentspec.text.prompt import BuiltPrompt, PromptBuilder
from agentspec.text.segmenter import Segmenter
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import ToolSchemas
from agentspec.text.turn_memory import TurnMemory

_FILE_NAMES = ("vocab_file", "merges_file", "tokenizer_file")
"""What some tokenizers' settings say of the machine that they were written on."""


@dataclass(frozen=True, slots=True)
class TextPipeline:
    """Tokenizer and, if the checkpoint has a chat template, what makes prompts of messages. One per served model: it remembers turns."""

    tokenizer: Tokenizer
    prompts: PromptBuilder | None
    builder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="agentspec-prompts"))
    """Builds prompts, one at a time: what a client that left has asked for is built to its end before the next."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json's, named tokens as texts, with the chat template that is used."""

    @classmethod
    def from_checkpoint(
        cls, tokenizer: Tokenizer | None, model_dir: Path | None, *, chat_template: Path | None = None, trusts_client_text: bool = False
    ) -> Self | None:
        """None without a tokenizer. chat_template: a file in place of the directory's own. trusts_client_text: see PromptBuilder.

        Raises CheckpointError when the chat template can't be used, ConfigError for a `chat_template` that there is no use for."""
        if tokenizer is None or model_dir is None:
            if chat_template is not None:
                raise ConfigError("chat_template", str(chat_template), "this checkpoint has no tokenizer, so it takes no messages")
            return None if tokenizer is None else cls(tokenizer, None)
        template = ChatTemplate.from_directory(model_dir, instead=chat_template)
        config = read_object(model_dir / "tokenizer_config.json")
        settings = {name: value for name, value in config.items() if name not in _FILE_NAMES} | named_tokens(config)
        if template is None:
            return cls(tokenizer, None, settings=settings)
        prompts = PromptBuilder(tokenizer, template, TurnMemory(), trusts_client_text=trusts_client_text)
        return cls(tokenizer, prompts, settings=settings | {"chat_template": template.source})

    def segmenter(
        self, tools: Tools | None, prompt: BuiltPrompt, *, has_form: bool = False, places: Mapping[str, Container[int]] | None = None
    ) -> Segmenter:
        """Splits one answer. Tool calls are read only when the request has tools; `has_form`: its content has a form that was asked for; `places`:
        where tags that are tokens stand in its text."""
        assert self.prompts is not None
        return Segmenter(
            reasoning_open=prompt.reasoning_open,
            dialect=self.prompts.dialect,
            tools=None if tools is None else ToolSchemas(tools),
            has_form=has_form,
            is_mid_text=prompt.is_mid_text,
            places=places,
        )
