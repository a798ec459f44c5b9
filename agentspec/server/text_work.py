"""Unbounded work on clients' texts: building prompts and encoding. The work is done in this process, or elsewhere
behind the same interface.

Knows nothing of HTTP. Cheap and bounded work (one answer's text, single tokens) is done by pipeline.py directly.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from agentspec.fair_queue import Flow
from agentspec.text.events import AssistantTurn
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.token_limit import TokenLimit, encode_within
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import Dialect


class PromptFacts(Protocol):
    """Properties of the prompt builder that the server needs. A PromptBuilder has them."""

    @property
    def dialect(self) -> Dialect | None: ...

    @property
    def template_reads(self) -> frozenset[str]: ...

    @property
    def tag_ids(self) -> Mapping[str, int]: ...

    @property
    def num_spliced(self) -> int: ...

    @property
    def num_mismatched(self) -> int: ...


class TextWork(Protocol):
    """Raises RequestError for invalid input, ContextLengthError for too many tokens, OverloadedError if too much work
    waits."""

    async def build(self, asked: PromptAsk, flow: Flow) -> BuiltPrompt: ...

    def remember(
        self,
        prompt: BuiltPrompt,
        turn: AssistantTurn,
        token_ids: Sequence[int],
        *,
        is_cut: bool,
        skip_special_tokens: bool,
    ) -> None:
        """Store a finished turn: see PromptBuilder.remember."""

    async def encode(self, texts: list[str], limit: TokenLimit, flow: Flow) -> list[array[int]]:
        """The ids of each text. Each text must keep to the limit."""


class ThreadedText:
    """Does the work in this process, on a thread: for engines embedded in another program. A job can't be
    interrupted."""

    def __init__(self, tokenizer: Tokenizer, prompts: PromptBuilder | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="agentspec-prompts")
        """Builds prompts, one at a time: a prompt is finished even if its client has left."""

    async def build(self, asked: PromptAsk, flow: Flow) -> BuiltPrompt:
        assert self._prompts is not None
        return await asyncio.get_running_loop().run_in_executor(self._builder, self._prompts.build, asked)

    def remember(
        self,
        prompt: BuiltPrompt,
        turn: AssistantTurn,
        token_ids: Sequence[int],
        *,
        is_cut: bool,
        skip_special_tokens: bool,
    ) -> None:
        assert self._prompts is not None
        self._prompts.remember(prompt, turn, token_ids, is_cut=is_cut, skip_special_tokens=skip_special_tokens)

    async def encode(self, texts: list[str], limit: TokenLimit, flow: Flow) -> list[array[int]]:
        return await asyncio.to_thread(encode_within, self._tokenizer, texts, each=limit)
