"""Test doubles for replays: an event loop with a virtual clock, and a scripted OpenAI server.

The clock moves only when all tasks wait, so `run(main())` takes no real time and gives the same times on every run.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx


class _VirtualSelector(selectors.DefaultSelector):
    """Advances the clock instead of blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits for something that never comes")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run immediately, since the virtual clock does not wait for threads."""
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run like asyncio.run, on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass(kw_only=True)
class Answer:
    """The server's answer to one request. Each text is one stream event, `gap` seconds apart, after `wait` seconds."""

    texts: Iterable[str] = ("a", "b", "c")
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """(id, name, arguments)."""
    wait: float = 0.5
    gap: float = 0.1
    usage: dict[str, Any] | None = field(
        default_factory=lambda: {
            "prompt_tokens": 100,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 64},
        }
    )
    metrics: dict[str, Any] | None = None
    status: int = 200
    raw: list[str] | None = None
    """Raw lines of the stream, in place of the fields above."""
    finish: str | None = None
    """finish_reason; None: derived from the calls."""
    hangs: bool = False
    ends_early: bool = False


@dataclass
class Seen:
    """A received request."""

    time: float
    path: str
    body: dict[str, Any]
    headers: httpx.Headers

    @property
    def session(self) -> str:
        return self.headers["x-session-id"]


class FakeServer:
    """Answers with `script(body)` and keeps the requests."""

    def __init__(
        self,
        script: Callable[[dict[str, Any]], Answer] | None = None,
        *,
        owner: str = "somebody",
        has_models: bool = True,
    ) -> None:
        self.script = script or (lambda body: Answer())
        self.requests: list[Seen] = []
        self._owner = owner
        self._has_models = has_models

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._handle), base_url="http://server")

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            if not self._has_models:
                return httpx.Response(404, json={"error": {"message": "no such page"}})
            return httpx.Response(200, json={"data": [{"id": "fake-model", "owned_by": self._owner}]})
        body = json.loads(request.content)
        self.requests.append(Seen(asyncio.get_running_loop().time(), request.url.path, body, request.headers))
        answer = self.script(body)
        if answer.status != 200:
            return httpx.Response(answer.status, json={"error": {"message": f"refused with {answer.status}"}})
        return httpx.Response(
            200,
            stream=_Stream(
                _lines(answer, "chat" in request.url.path, "continuous_usage_stats" in body["stream_options"])
            ),
        )


class _Stream(httpx.AsyncByteStream):
    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._lines:
            yield line.encode()


async def _lines(answer: Answer, is_chat: bool, counts: bool) -> AsyncIterator[str]:
    if answer.raw is not None:
        for line in answer.raw:
            yield line
        return
    if is_chat:
        yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], **_so_far(counts, 0))
    await asyncio.sleep(1e9 if answer.hangs else answer.wait)
    num_tokens = 0
    for index, text in enumerate(answer.texts):
        if index:
            await asyncio.sleep(answer.gap)
        num_tokens += len(text)
        shown: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        yield _event(choices=[{"index": 0, **shown}], **_so_far(counts, num_tokens))
    for index, (call_id, name, arguments) in enumerate(answer.calls):
        half = len(arguments) // 2
        first = {
            "index": index,
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments[:half]},
        }
        yield _event(choices=[{"delta": {"tool_calls": [first]}}])
        yield _event(
            choices=[{"delta": {"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]}}]
        )
    if answer.ends_early:
        return
    yield _event(choices=[{"delta": {}, "finish_reason": answer.finish or ("tool_calls" if answer.calls else "stop")}])
    tail: dict[str, Any] = {"choices": []}
    if answer.usage is not None:
        tail["usage"] = answer.usage
    if answer.metrics is not None:
        tail["metrics"] = answer.metrics
    yield _event(**tail)
    yield "data: [DONE]\n\n"


def _so_far(counts: bool, num_tokens: int) -> dict[str, Any]:
    return {"usage": usage(100, num_tokens)} if counts else {}


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": cached}
    return body


def speculation(*, steps: int, drafted: list[int], accepted: list[int], forced: bool = False) -> dict[str, Any]:
    """Return `metrics` as agentspec's server writes them."""
    counters: dict[str, Any] = {
        "num_spec_steps": steps,
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "by_source": {"mtp": {"drafted_by_position": drafted, "accepted_by_position": accepted}},
    }
    if forced:
        counters["forced"] = True
    return {"speculative_decoding": counters}
