"""A whole server around a model that emits scripted answers: real engine, real text, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from agentspec.config import EngineConfig
from agentspec.engine.assembly import build
from agentspec.engine.in_process import AsyncEngine
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.server.transport import InProcessTransport
from agentspec.text.tokenizer import Tokenizer
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.text import END_OF_TURN, write_text_assets
from tests.replay.builders import TOOL


class Told:
    """One server. Writes a tokenizer and a chat template into the checkpoint's directory."""

    def __init__(self, directory: Path) -> None:
        write_text_assets(directory)
        tokenizer = Tokenizer.from_directory(directory)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.stop_id = tokenizer.special_ids[END_OF_TURN]
        self.model = ScriptedModel(num_tokens=tokenizer.vocab_size, stop_id=self.stop_id)
        memory = MemoryPlan(num_rows=100, num_pages=400, max_length=8192)
        parts = build(
            self.model,
            config=EngineConfig(draft_tokens=7, max_running=4),
            memory=memory,
            tokenizer=tokenizer,
            model_dir=directory,
        )
        self.engine = AsyncEngine(parts)
        self.app = self.engine.app

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with (
            self.engine,
            httpx.AsyncClient(
                transport=InProcessTransport(self.app), base_url="http://in-process", timeout=None
            ) as client,
        ):
            yield client

    async def ask(
        self,
        client: httpx.AsyncClient,
        messages: list[dict[str, Any]],
        says: str = "",
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """One chat turn, answered with `says` and an end of turn; without `says`, with up to 5 arbitrary tokens."""
        body = {
            "model": "scripted",
            "messages": messages,
            "tools": tools or [TOOL],
            "temperature": 0,
            "return_token_ids": True,
        }
        if says:
            asked = {name: body[name] for name in ("model", "messages", "tools")}
            prompt = (await client.post("/tokenize", json=asked)).json()["tokens"]
            self.model.script(prompt, [*self.tokenizer.encode(says), self.stop_id])
        answer = await client.post("/v1/chat/completions", json=body | {"max_tokens": 2500 if says else 5})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def converse(directory: Path, talk: Callable[[Told, httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        told = Told(directory)
        async with told.client() as client:
            await talk(told, client)

    asyncio.run(run())
