"""Work on clients' texts, whatever their size: prompts built of messages, and texts encoded. In this process, or behind
a door of the same shape.

Knows nothing of HTTP. What is cheap and bounded (one answer's text, single tokens) is pipeline.py's and stays with
whoever asks.
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
    """What the server asks of whoever builds its prompts, beside the prompts. A PromptBuilder has it."""

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
    """Raises RequestError for what can't be used, ContextLengthError for too many tokens, OverloadedError where too
    much waits."""

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
        """Keep a finished turn: see PromptBuilder.remember."""
        ...

    async def encode(self, texts: list[str], limit: TokenLimit, flow: Flow) -> list[array[int]]:
        """The ids of each text, none of which may have more than the limit."""
        ...


class ThreadedText:
    """In this process, on a thread of its own: for engines that are somebody's library. Nothing ends a job but its own
    end."""

    def __init__(self, tokenizer: Tokenizer, prompts: PromptBuilder | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="agentspec-prompts")
        """Builds prompts, one at a time: what a client that left has asked for is built to its end before the next."""

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
