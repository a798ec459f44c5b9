"""Runs agents against the scripted APIs and keeps what they sent: `python -m scripts.clients.record codex pi`, all of
them without a name.

A recording is tests/data/clients/NAME.json.xz: the agent's version, and every request with its method, path, headers
and body. Bodies are kept as they were, but for words that are private to the machine or change from run to run
(neutral.py), and for texts, of which only the length stays (reworded.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scripts.clients.agents import AGENTS, MODEL, ROOT, WORKSPACE, Agent, Calls, Place
from scripts.clients.neutral import neutral
from scripts.clients.reworded import reworded
from scripts.clients.scripted_api import scripted_api

RECORDINGS = ROOT / "tests" / "data" / "clients"
SECRET_HEADERS = frozenset({"authorization", "x-api-key", "cookie"})
PASSING_HEADERS = frozenset({"host", "content-length", "connection", "accept-encoding"})
"""Of the connection, not of the client."""


class Recorder:
    """An ASGI app in front of another: notes every request, and the status of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: list[dict[str, str]] = []
        """The headers of each answer."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        path = scope["path"] + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = {name: value for name, value in headers.items() if name not in SECRET_HEADERS | PASSING_HEADERS}
        request = {"method": scope["method"], "path": path, "headers": kept, "body": json.loads(body) if body else None}
        self.requests.append(request)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                request["status"] = message["status"]
                self.answers.append({name.decode(): value.decode() for name, value in message["headers"]})
            await send(message)

        await self._app(scope, replay, told)


class _Unsignalled(uvicorn.Server):
    """Runs beside the main thread, which alone may have handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The app on a free port of this machine; the value is its root, without a slash at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = _Unsignalled(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def in_place(calls: Calls, workspace: Path) -> Calls:
    return tuple(
        (
            name,
            {
                key: value.replace(WORKSPACE, str(workspace)) if isinstance(value, str) else value
                for key, value in given.items()
            },
        )
        for name, given in calls
    )


def record(agent: Agent) -> list[dict[str, Any]]:
    """Its requests, in the order in which they came. Raises RuntimeError where it didn't finish."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        root = Path(scratch).resolve()
        recorder = Recorder(scripted_api(in_place(agent.calls, root / "workspace"), MODEL))
        with served(recorder) as url:
            place = Place(scratch=root, url=url)
            done = agent.run(place)
        print(
            f"{agent.name}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}",
            file=sys.stderr,
        )
        for request in recorder.requests:
            print(f"  {request['method']} {request['path']} -> {request.get('status')}", file=sys.stderr)
        if done.returncode != 0:
            raise RuntimeError(f"{agent.name} ended with {done.returncode}")
        return [request | {"body": reworded(request["body"])} for request in neutral(recorder.requests, place)]


def save(agent: Agent, requests: list[dict[str, Any]]) -> Path:
    """xz, not gzip: each body repeats the one before it, further back than gzip looks."""
    path = RECORDINGS / f"{agent.name}.json.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"client": agent.name, "package": agent.package, "version": agent.version, "requests": requests}
    path.write_bytes(lzma.compress(json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode(), preset=9))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="agents; all by default")
    wanted = parser.parse_args().names or [agent.name for agent in AGENTS]
    for agent in AGENTS:
        if agent.name not in wanted:
            continue
        if why := agent.why_not():
            print(f"{agent.name} is left out: {why}", file=sys.stderr)
            continue
        path = save(agent, record(agent))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
