"""10,000 random requests against a real engine behind the real app, in process.

Memory is small, many clients run at once, and some disconnect. After every batch

- every request has its answer, and no answer is a 5xx or one that the OpenAPI document doesn't describe; only /ready
  says 503, when no further request is admitted;
- every accepted request is valid by the document; every refusal names a field that the client knows;
- every stream that was read to its end has exactly one terminal event, the last one.

At the end nothing runs or waits, no row or page is leased, the cache passes its audit, and a plain request gets the
expected tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from agentspec.cache import invariants
from agentspec.config import EngineConfig, ServerConfig
from agentspec.engine.assembly import build
from agentspec.engine.in_process import AsyncEngine
from agentspec.runtime.grammar.process import TrialProcess
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.server.app import ROUTES
from agentspec.server.door import Door
from agentspec.server.openapi import document
from agentspec.server.transport import InProcessTransport
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import BLOCK_TOKENS, SamplingParams
from tests.fakes.hash_chain import ReferenceRequest
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.text import END_OF_TURN, TEMPLATE_FILE, write_text_assets
from tests.properties.http_bodies import MODEL, NUM_TOKENS, STOP_ID, Ask, Bodies, Seen
from tests.properties.http_schemas import EXPLODING, call_text
from tests.server.conftest import TEMPLATE

NUM_PARTS = 20
PART = 500
BATCH = 25
PATIENCE_SECONDS = 120
"""A request that takes longer counts as hanging: a whole part takes a few seconds."""
STATS_PATIENCE = 2000
MAX_LENGTH = 2000
ROOM_FOR_EVERYTHING = 2**20
"""Tokens. Enough that no prompt with a tool schema of EXPLODING is refused as too long."""
CONSTRAINED_EVERY = 4
"""Grammars take time to compile, so only some of the engines have them."""

HERMES = TEMPLATE.replace("<function=NAME></function>", '{"name": <function-name>, "arguments": <args-json-object>}')
PICKY = (
    "{% if messages|length > 3 or messages[0].role == 'system' %}{{ raise_exception('too much') }}{% endif %}"
    + TEMPLATE
)
WITH_EFFORT = TEMPLATE.replace("assistant\n", "assistant {{ reasoning_effort }}\n")
TEMPLATES = {
    "bundled": None,
    "small": TEMPLATE,
    "hermes": HERMES,
    "picky": PICKY,
    "effort": WITH_EFFORT,
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
}

TERMINAL = {
    "/v1/messages": ("message_stop", "error"),
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
}
DOCUMENT = document(ROUTES)


@functools.cache
def the_model(max_context: int = 4096) -> ScriptedModel:
    return ScriptedModel(num_tokens=NUM_TOKENS, stop_id=STOP_ID, max_context=max_context, stop_chance=0.06)


class Fuzz:
    """One engine, its app, and clients, all derived from one seed."""

    def __init__(self, seed: int, directory: Path, *, max_length: int | None = None) -> None:
        """max_length: of a sequence, in tokens; None: MAX_LENGTH, with a memory that is small for it."""
        rng = self.rng = random.Random(seed)
        self.template = rng.choice(list(TEMPLATES))
        write_text_assets(directory)
        source = TEMPLATES[self.template]
        (directory / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text() if source is None else source)
        tokenizer = Tokenizer.from_directory(directory)
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.stop_id = tokenizer.special_ids[END_OF_TURN]
        self.model = the_model() if max_length is None else the_model(max_length)
        assert self.model.spec.stop_token_ids == (self.stop_id,)
        drafts, max_running = rng.choice([0, 1, 3, 7]), rng.choice([1, 4, 6])
        memory = MemoryPlan(
            num_rows=2 + max_running * (drafts + 3) + rng.choice([4, 30]),
            num_pages=rng.choice([34, 34, 60]),
            max_length=MAX_LENGTH,
        )
        if max_length is not None:
            memory = replace(memory, num_pages=max_length // BLOCK_TOKENS + 2, max_length=max_length)
        config = EngineConfig(
            draft_tokens=drafts, max_running=max_running, overlap=rng.random() < 0.7, prefix_cache=rng.random() < 0.9
        )
        self.parts = build(self.model, config=config, memory=memory, tokenizer=tokenizer, model_dir=directory)
        self.engine = AsyncEngine(self.parts)
        self.door = Door(self.engine.app, ServerConfig(max_queue=rng.choice([6, 100, 100])), max_running=max_running)
        self.seen = Seen()
        self.bodies = Bodies(rng, self.seen, constrained_share=0.2 if seed % CONSTRAINED_EVERY == 0 else 0.0)
        self.statuses: Counter[tuple[str, int]] = Counter()
        """(endpoint, status); 0 and 1 for clients that left before the first byte and in the middle of a stream."""

    async def run(self, num_requests: int) -> None:
        transport = InProcessTransport(self.door)
        async with (
            self.engine,
            httpx.AsyncClient(transport=transport, base_url="http://in-process", timeout=None) as self.client,
        ):
            for _ in range(num_requests // BATCH):
                asks = [self.bodies.next() for _ in range(BATCH)]
                gate = asyncio.Semaphore(self.rng.choice([1, 4, 12, BATCH]))
                going = [*(self._through(gate, ask) for ask in asks), self._call_a_tool()]
                await asyncio.wait_for(asyncio.gather(*going), PATIENCE_SECONDS)
            await self._check_rest()
        self._check_accounting()
        counts = Counter(status for _, status in self.statuses.elements())
        assert min(counts[200], counts[400], 8 * counts[0], 20 * counts[1]) > num_requests / 6, (
            f"the requests are all alike: {counts}"
        )

    async def answers(self, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        """To chat requests, one after the other."""
        async with (
            self.engine,
            httpx.AsyncClient(
                transport=InProcessTransport(self.door), base_url="http://in-process", timeout=None
            ) as client,
        ):
            return [await client.post("/v1/chat/completions", content=json.dumps(body).encode()) for body in bodies]

    async def _through(self, gate: asyncio.Semaphore, ask: Ask) -> None:
        async with gate:
            try:
                await self._send(ask)
            except Exception as error:
                leaves = (ask.leaves_after_turns, ask.leaves_after_parts)
                error.add_note(
                    f"{ask.method} {ask.path}?{ask.query[:100]} {leaves=} template={self.template}\n"
                    f"{ask.content[:2000]!r}"
                )
                raise

    async def _send(self, ask: Ask) -> None:
        url = ask.path + (f"?{ask.query}" if ask.query else "")
        request = self.client.build_request(ask.method, url, content=ask.content, headers=ask.headers)
        sending = asyncio.create_task(self.client.send(request, stream=True))
        if ask.leaves_after_turns is not None:
            for _ in range(ask.leaves_after_turns):
                if sending.done():
                    break
                await asyncio.sleep(0)
            else:
                sending.cancel()
                await asyncio.wait((sending,))
                if sending.cancelled():
                    self.statuses[ask.path, 0] += 1
                    return
        response = await sending
        if ask.leaves_after_parts is not None and response.headers.get("content-type", "").startswith(
            "text/event-stream"
        ):
            parts = response.aiter_raw()
            for _ in range(ask.leaves_after_parts):
                await anext(parts, b"")
            await response.aclose()
            self.statuses[ask.path, 1] += 1
            return
        await response.aread()
        self._check(ask, response)

    def _check(self, ask: Ask, response: httpx.Response) -> None:
        status = response.status_code
        self.statuses[ask.path if ask.method == "POST" else f"{ask.method} {ask.path}", status] += 1
        is_full = status == 503 and ask.path.rstrip("/") == "/ready"
        assert status < 500 or is_full, response.text
        operation = operation_of(ask)
        if operation is None:
            assert status in (404, 405), status
            return
        assert str(status) in operation["responses"], (status, response.text)
        if ask.method == "HEAD":
            assert response.content == b""
            return
        media = response.headers["content-type"].partition(";")[0]
        content = operation["responses"][str(status)]["content"]
        assert media in content, media
        if media == "text/event-stream":
            check_stream(ask.path, response.text)
        elif media == "application/json":
            answer = response.json()
            if errors := [error.message for error in validator(content[media]["schema"]).iter_errors(answer)]:
                raise AssertionError(f"{errors}: {response.text}")
            self._learn(ask, answer)
        if "requestBody" not in operation:
            return
        schema = body_schema(operation)
        if status == 200:
            errors = [error.message for error in validator(schema).iter_errors(ask.body)]
            assert not errors, f"taken, and not described: {errors}"
        elif status == 400:
            check_refusal(ask, response.json()["error"], resolved(schema)["properties"].keys())

    def _learn(self, ask: Ask, answer: dict[str, Any]) -> None:
        if answer.get("object") == "response":
            self.seen.response_ids.append(answer["id"])
        elif answer.get("object") == "chat.completion":
            self.seen.turns.append(answer["choices"][0]["message"])

    async def _call_a_tool(self) -> None:
        """The model says a call of a tool with an odd schema, beside the requests of a batch."""
        asked: dict[str, Any] = {}
        while not asked.get("tools"):
            asked = self.bodies.chat()
        asked |= {"n": 1, "temperature": 0, "max_tokens": 150, "cache_salt": ""}
        for name in (
            "logit_bias",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "max_completion_tokens",
            "stop",
            "stop_token_ids",
        ):
            asked.pop(name, None)
        content = json.dumps(asked).encode()
        shown = await self.client.post("/v1/chat/completions/render", content=content)
        if shown.status_code != 200 or not 0 < shown.json()["count"] < MAX_LENGTH:
            return
        says = call_text(self.rng, "hermes" if self.template == "hermes" else "qwen3_coder", asked["tools"])
        self.model.script(shown.json()["token_ids"], [*self.tokenizer.encode(says)[:140], self.stop_id])
        ask = Ask(method="POST", path="/v1/chat/completions", content=content, body=asked)
        await self._through(asyncio.Semaphore(), ask)

    async def _check_rest(self) -> None:
        """Nothing is left over, and the engine still answers."""
        prompt = [self.rng.randrange(NUM_TOKENS - 9) for _ in range(150)]
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await asyncio.wait_for(self.client.post("/v1/completions", json=body), PATIENCE_SECONDS)
        plain = ReferenceRequest(
            prompt=prompt, sampling=SamplingParams(temperature=0), seed=0, length_limit=len(prompt) + 20
        )
        assert answer.json()["choices"][0]["token_ids"] == self.model.reference_stream(plain)
        before = await self._until_idle()
        async with self.client.stream(
            "POST", "/v1/completions", json=body | {"max_tokens": 2000, "stream": True}
        ) as stream:
            assert stream.status_code == 200
            await anext(stream.aiter_raw())
        steps = (await self._until_idle())["engine"]["steps"] - before["engine"]["steps"]
        assert steps < 300, f"{steps} steps for a client that left after the first"
        assert not self.engine._streams
        assert not self.engine._compiling
        assert self.door._active == 0

    async def _until_idle(self) -> dict[str, Any]:
        """The engine's counters once nothing runs, waits or holds memory any more."""
        for _ in range(STATS_PATIENCE):
            stats: dict[str, Any] = (await self.client.get("/stats")).json()
            # An abort that ends its request at once leaves the terminal event to the next turn of the loop, which comes
            # after this answer.
            if not (stats["running"] or stats["waiting"] or stats["cache"]["leases"] or self.engine._streams):
                return stats
        raise AssertionError(f"left over: {stats}")

    def _check_accounting(self) -> None:
        """Every row and page is free or the tree's, which the audit makes sure of when there are no leases."""
        cache = self.parts.cache
        assert not cache.leases
        assert not self.parts.loop.has_work
        invariants.check(cache)
        cache.clear()
        assert (cache.rows.num_used, cache.pages.num_used) == (0, 0)


def operation_of(ask: Ask) -> dict[str, Any] | None:
    """The request's operation in the OpenAPI document; None if it isn't served. A HEAD is treated as a GET, and
    trailing slashes are ignored."""
    method = "get" if ask.method == "HEAD" else ask.method.lower()
    asked = ask.path.rstrip("/").replace("%2f", "/") or "/"
    for path, operations in DOCUMENT["paths"].items():
        pattern = re.sub(r"\\{model\\}", ".+", re.escape(path))
        if method in operations and re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", pattern), asked):
            operation: dict[str, Any] = operations[method]
            return operation
    return None


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["$ref"].removeprefix("#/components/schemas/")
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
    return found


def body_schema(operation: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = operation["requestBody"]["content"]["application/json"]["schema"]
    return schema


def validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    return _validator(json.dumps(schema))


@functools.cache
def _validator(schema: str) -> jsonschema_rs.Draft202012Validator:
    """Validate as msgspec decodes: where only one type of object is allowed, the field that names the type may be
    missing."""
    relaxed = {
        name: component
        | {
            "required": [
                field for field in component["required"] if len(component["properties"][field].get("enum", ())) != 1
            ]
        }
        for name, component in DOCUMENT["components"]["schemas"].items()
    }
    return jsonschema_rs.Draft202012Validator({**json.loads(schema), "components": {"schemas": relaxed}})


def check_refusal(ask: Ask, error: dict[str, Any], fields: Any) -> None:
    """Check that a 400 starts with the name of a field of the endpoint or of the body."""
    message = error["message"]
    if message.startswith("the body is"):
        return
    known = {*fields, "body", *(ask.body if isinstance(ask.body, dict) else ())}
    named = [name for name in known if message.startswith(name) and re.match(r"[=.\[]", message[len(name) :])]
    assert named, f"names no field: {message}"
    if "param" in error:
        assert message.startswith(f"{error['param']}="), error


def check_stream(path: str, text: str) -> None:
    frames = text.split("\n\n")
    assert frames.pop() == "", "the last frame has no end"
    if path in TERMINAL:
        heads = [frame.partition("\n")[0].removeprefix("event: ") for frame in frames]
        events = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]
        assert [event["type"] for event in events] == heads
        assert [head for head in heads if head in TERMINAL[path]] == heads[-1:], heads
        assert heads[-1] not in ("error", "response.failed"), events[-1]
        if path == "/v1/responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return
    data = [frame.removeprefix("data: ") for frame in frames]
    assert data.count("[DONE]") == 1, data[-1]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(part) for part in data[:-1]]
    assert not any("error" in chunk for chunk in chunks), data[-2]
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is not None]
    assert sorted(ends) == sorted({choice["index"] for chunk in chunks for choice in chunk["choices"]}), (
        "not one finish reason for each choice"
    )


@pytest.mark.parametrize("seed", range(NUM_PARTS))
def test_random_requests_get_documented_answers(seed: int, tmp_path: Path) -> None:
    asyncio.run(Fuzz(seed, tmp_path).run(PART))


def test_oversized_schemas_are_refused_before_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialProcess, "run", lambda process, job: pytest.fail(f"compiles {job.source[:200]}"))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    asks = [(f"structured_outputs.{kind}", chat | {"structured_outputs": {kind: value}}) for kind, value in EXPLODING]
    schemas = [schema for kind, schema in EXPLODING if kind == "json"]
    asks += [("tools[0].function.parameters", chat | {"tools": [tool(schema, strict=True)]}) for schema in schemas]
    asks += [
        ("response_format.json_schema.schema", chat | {"response_format": named_format(schema)}) for schema in schemas
    ]
    fuzz = Fuzz(0, tmp_path, max_length=ROOM_FOR_EVERYTHING)
    answers = asyncio.run(fuzz.answers([body for _, body in asks]))
    for (field, body), answer in zip(asks, answers, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, str(error["param"])[: len(field)]) == (400, field), (
            json.dumps(body)[:300],
            answer.text[:500],
        )


def test_unsatisfiable_grammars_are_refused(tmp_path: Path) -> None:
    grammars = ["root ::= root", 'root ::= "a" x\nx ::= x', 'root ::= "a" root']
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    *refused, endless = asyncio.run(
        Fuzz(0, tmp_path).answers([chat | {"structured_outputs": {"grammar": grammar}} for grammar in grammars])
    )
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs.grammar"), answer.text
    assert endless.json()["choices"][0]["message"]["content"] == "aaaaa"


def tool(schema: Any, *, strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}


def named_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
