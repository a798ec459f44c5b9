"""The text package as the server uses it: one object for a checkpoint that has a tokenizer.

Knows which parts belong together, and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Self

from agentspec.errors import ConfigError
from agentspec.server.text_work import PromptFacts, TextWork, ThreadedText
from agentspec.text.assets import named_tokens, read_object
from agentspec.text.chat_template import ChatTemplate, Tools
from agentspec.text.prompt import BuiltPrompt, PromptBuilder
from agentspec.text.segmenter import Segmenter
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import ToolSchemas
from agentspec.text.turn_memory import TurnMemory

_FILE_NAMES = ("vocab_file", "merges_file", "tokenizer_file")
"""Tokenizer settings that reveal file paths of the machine that wrote them."""

NO_USE_FOR_A_TEMPLATE = "this checkpoint has no tokenizer, so it takes no messages"


class TextPipeline:
    """The tokenizer and, if the checkpoint has a chat template, the prompt builder. One per served model, since it
    remembers turns."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: PromptFacts | None,
        work: TextWork | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """prompts: None without a chat template. work: None: done in this process, by `prompts`, which is then a
        PromptBuilder."""
        self.tokenizer = tokenizer
        """For cheap and bounded work. Clients' texts go to `work`."""
        self.prompts = prompts
        if work is None:
            assert prompts is None or isinstance(prompts, PromptBuilder)
            work = ThreadedText(tokenizer, prompts)
        self.work = work
        self.settings = settings or {}
        """The content of tokenizer_config.json, with special tokens as texts and the chat template in use."""

    @classmethod
    def from_checkpoint(
        cls,
        tokenizer: Tokenizer | None,
        model_dir: Path | None,
        *,
        chat_template: Path | None = None,
        trusts_client_text: bool = False,
    ) -> Self | None:
        """The pipeline of a checkpoint; None without a tokenizer. chat_template: a file used instead of the directory's
        own. trusts_client_text: see PromptBuilder.

        Raises CheckpointError for an invalid chat template, ConfigError for a `chat_template` without a tokenizer."""
        if tokenizer is None or model_dir is None:
            if chat_template is not None:
                raise ConfigError("chat_template", str(chat_template), NO_USE_FOR_A_TEMPLATE)
            return None if tokenizer is None else cls(tokenizer, None)
        template = ChatTemplate.from_directory(model_dir, instead=chat_template)
        prompts = (
            None
            if template is None
            else PromptBuilder(tokenizer, template, TurnMemory(), trusts_client_text=trusts_client_text)
        )
        return cls(
            tokenizer, prompts, settings=tokenizer_settings(model_dir, None if template is None else template.source)
        )

    def segmenter(
        self,
        tools: Tools | None,
        prompt: BuiltPrompt,
        *,
        has_form: bool = False,
        places: Mapping[str, Container[int]] | None = None,
    ) -> Segmenter:
        """The segmenter for one answer. Tool calls are parsed only if the request has tools. has_form: the content has
        a requested form. places: positions of tags that are tokens, in the answer's text."""
        assert self.prompts is not None
        return Segmenter(
            reasoning_open=prompt.reasoning_open,
            dialect=self.prompts.dialect,
            tools=None if tools is None else ToolSchemas(tools),
            has_form=has_form,
            is_mid_text=prompt.is_mid_text,
            places=places,
        )


def tokenizer_settings(model_dir: Path, template_source: str | None) -> dict[str, Any]:
    """TextPipeline.settings. template_source: the chat template's text, if there is one."""
    config = read_object(model_dir / "tokenizer_config.json")
    settings = {name: value for name, value in config.items() if name not in _FILE_NAMES} | named_tokens(config)
    return settings if template_source is None else settings | {"chat_template": template_source}
