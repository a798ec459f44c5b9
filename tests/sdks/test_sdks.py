"""Real SDKs and agent frameworks, in their own environments, run tool loops against the server over a socket.

The engine is real, with the bundled model. Its answers are scripted by forced output, except in tests of output forms.
Each client is a program in `programs` or `node` that reports the calls to its tools and the final answer. `make
test-sdks` installs them; missing ones are skipped.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.in_process import AsyncEngine
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.server.unknown_fields import HEADER
from scripts.clients.agents import MODEL, NOTES, Place, quiet
from scripts.clients.record import Recorder
from tests.fakes.scripted_outputs import OutputsInTurn
from tests.sdks.programs import task
from tests.sdks.recorded import recorded
from tests.server.loopback import served

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-sdks"
OWN_VENV = Path(sys.prefix)
"""This environment has the newest openai package; LiteLLM requires an older one."""
HERE = Path(__file__).parent

Output = str | tuple[str, dict[str, Any]]

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("search_rooms", {"city": "Graz", "guests": 2, "features": ["desk", 'a view of the "Schloßberg"']}),
    ("book_room", {"room_id": "R-17", "nights": 3}),
)
ANSWER = "Room R-17 is booked for three nights; the number of the booking is B-5521."
COMMANDS = ("cat notes.txt", "cat other.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat notes.txt")


def blocks(*codes: str, opening: str, closing: str) -> tuple[str, ...]:
    """Return answers of agents whose calls are code in the text."""
    return tuple(f"Thought: the next step.\n{opening}\n{code}\n{closing}" for code in codes)


@dataclass(frozen=True, kw_only=True)
class Client:
    program: str
    way: str = ""
    venv: Path = VENV
    outputs: tuple[Output, ...] = (*CALLS, ANSWER)
    calls: tuple[tuple[str, dict[str, Any]], ...] = CALLS
    results: tuple[str, ...] = ("81.5", "kx-8")
    """Text that occurs only in the results of its calls."""
    answers: tuple[str, ...] = (ANSWER, ANSWER)
    modes: tuple[str, ...] = ("whole", "streamed")

    def command(self) -> list[str]:
        if self.program.endswith(".mjs"):
            return ["node", str(HERE / "node" / self.program)]
        return [str(self.venv / "bin" / "python"), str(HERE / "programs" / self.program)]

    def skip_if_missing(self) -> None:
        in_node = self.program.endswith(".mjs")
        if in_node and shutil.which("node") is None:
            pytest.skip("the AI SDK needs node")
        there = HERE / "node" / "node_modules" if in_node else self.venv
        if there != OWN_VENV and not (there / ".installed").exists():
            pytest.skip(f"{there.relative_to(ROOT)} is not there: `make test-sdks` installs it")

    def run(self, place: Place, mode: str, model: str = MODEL) -> dict[str, Any]:
        """Run the program and return its report of the session."""
        place.workspace.mkdir(parents=True)
        place.home.mkdir(parents=True)
        (place.workspace / "notes.txt").write_text(NOTES)
        results = {"search_rooms": task.ROOMS, "book_room": task.BOOKED}
        environment = quiet(place) | {
            "PYTHONPATH": str(ROOT),
            "CLIENT_MODEL": model,
            "CLIENT_TASK": json.dumps(
                {"model": MODEL, "questions": [task.QUESTION, task.AGAIN], "schemas": task.SCHEMAS, "results": results}
            ),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_SILENT_STARTUP": "1",
        }
        command = [*self.command(), place.url, mode, *filter(None, [self.way])]
        done = subprocess.run(
            command,
            env=environment,
            cwd=place.workspace,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return told


def shell_agent(way: str, *outputs: Output) -> Client:
    """mini-swe-agent: one task, without streaming."""
    calls = tuple(("bash", {"command": command}) for command in COMMANDS)
    return Client(
        program="mini_swe_agent.py",
        way=way,
        outputs=outputs,
        calls=calls,
        results=("dozen", "No such file"),
        answers=(NOTES,),
        modes=("whole",),
    )


OPENAI = {
    "openai chat": Client(program="openai_chat.py"),
    "openai responses": Client(program="openai_responses.py"),
    "openai responses, stored": Client(program="openai_responses.py", way="stored"),
}
CLIENTS = {
    **OPENAI,
    **{f"{name}, newest": replace(client, venv=OWN_VENV) for name, client in OPENAI.items()},
    "LiteLLM, openai": Client(program="litellm_chat.py", way="openai"),
    "LiteLLM, hosted_vllm": Client(program="litellm_chat.py", way="hosted_vllm"),
    "LiteLLM, anthropic": Client(program="litellm_chat.py", way="anthropic"),
    "mini-swe-agent": shell_agent("litellm", *(("bash", {"command": command}) for command in COMMANDS)),
    "mini-swe-agent, responses": shell_agent(
        "litellm_response", *(("bash", {"command": command}) for command in COMMANDS)
    ),
    "mini-swe-agent, text": shell_agent(
        "litellm_textbased", *blocks(*COMMANDS, opening="```mswea_bash_command", closing="```")
    ),
    "smolagents, calls": Client(
        program="smolagents_agent.py", way="ToolCallingAgent", outputs=(*CALLS, ("final_answer", {"answer": ANSWER}))
    ),
    "smolagents, code": Client(
        program="smolagents_agent.py",
        way="CodeAgent",
        outputs=blocks(
            *(
                f"print({name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())}))"
                for name, arguments in CALLS
            ),
            f"final_answer({ANSWER!r})",
            opening="<code>",
            closing="</code>",
        ),
    ),
    "AI SDK, openai": Client(program="agent.mjs", way="openai"),
    "AI SDK, openai chat": Client(program="agent.mjs", way="openai.chat"),
    "AI SDK, openai-compatible": Client(program="agent.mjs", way="openai-compatible"),
    "AI SDK, anthropic": Client(program="agent.mjs", way="anthropic"),
    "Agent Framework, chat": Client(program="agent_framework_agent.py", way="OpenAIChatCompletionClient"),
    "Agent Framework, responses": Client(program="agent_framework_agent.py", way="OpenAIChatClient"),
}


class Watched:
    """The app with a scripted engine, and its requests."""

    def __init__(self, outputs: tuple[Output, ...]) -> None:
        self.recorder: Recorder
        self.engine: OutputsInTurn
        self._outputs = outputs

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with AsyncEngine(EngineConfig(allow_forced_output=True)) as engine:
            self.engine = OutputsInTurn(engine, self._outputs)
            self.recorder = Recorder(
                create_app(self.engine, TextPipeline.from_checkpoint(engine.tokenizer, engine.model_dir))
            )
            yield self.recorder

    def check(self, client: Client, mode: str, told: dict[str, Any]) -> None:
        """Check that every request was answered and has the client's settings, and that later ones hit the prefix
        cache."""
        requests = self.recorder.requests
        assert {request["status"] for request in requests} == {200}, [
            (request["path"], request["status"]) for request in requests
        ]
        assert {bool(request["body"].get("stream")) for request in requests if request["method"] == "POST"} == {
            mode == "streamed"
        }
        assert [answer[HEADER] for answer in self.recorder.answers if HEADER in answer] == [], "nothing was left out"
        for number, result in enumerate(client.results, start=1):
            first = next((place for place, prompt in enumerate(self.engine.prompts) if result in prompt), None)
            assert first == number, f"the model sees {result}, of the result of a call, before it goes on"
        cached = [event.usage.cached_tokens for event in self.engine.finished]
        assert len(cached) >= len(client.outputs)
        assert all(tokens > 0 for tokens in cached[1:]), cached
        assert told["cached"] in (None, cached), "the client tells its user the same"


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, client in CLIENTS.items() for mode in client.modes])
def test_tool_loop_of_each_sdk(name: str, mode: str, tmp_path: Path) -> None:
    client = CLIENTS[name]
    client.skip_if_missing()
    watched = Watched(client.outputs)
    with served(watched.open) as url:
        told = client.run(Place(scratch=tmp_path, url=url.rstrip("/")), mode)
    assert told["calls"] == [[name, arguments] for name, arguments in client.calls]
    assert told["answers"] == list(client.answers)
    watched.check(client, mode, told)


@pytest.mark.parametrize("venv", [VENV, OWN_VENV], ids=["older", "newest"])
@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("way", ["chat", "responses"])
def test_openai_parse_and_stream_work_with_generated_output(way: str, mode: str, venv: Path, tmp_path: Path) -> None:
    """`.parse()` and `.stream()` require strict tools, and an answer in the form of a pydantic model."""
    client = Client(program="openai_parsed.py", way=way, venv=venv)
    client.skip_if_missing()
    with recorded() as (url, recorder):
        told = client.run(Place(scratch=tmp_path, url=url), mode, bundled.NAME)
    assert told["calls"] == [["orders_get", {"order_id": "O-4071"}], ["orders_cancel", {"order_id": "O-4071"}]]
    assert told["answers"] == [{"order_id": "O-4071", "status": "paid"}, {"order_id": "O-4071", "status": "cancelled"}]
    assert len(told["cached"]) == 4
    assert all(tokens > 0 for tokens in told["cached"][1:])
    assert [answer[HEADER] for answer in recorder.answers if HEADER in answer] == []


@contextmanager
def litellm_proxy(place: Place) -> Iterator[str]:
    """LiteLLM's proxy in front of the server; yields its URL without a trailing slash."""
    place.home.mkdir(parents=True)
    settings = {"model": f"openai/{MODEL}", "api_base": f"{place.url}/v1", "api_key": "none"}
    (place.home / "proxy.yaml").write_text(
        json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": settings}]})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(VENV / "bin" / "litellm"),
        "--config",
        str(place.home / "proxy.yaml"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    permitted = "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"
    environment = quiet(place) | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONUNBUFFERED": "1", permitted: "true"}
    with subprocess.Popen(
        command,
        env=environment,
        cwd=place.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as proxy:
        assert proxy.stdout is not None
        rest = threading.Thread(target=proxy.stdout.read)  # drain the output, so that the proxy never blocks on it
        try:
            said = []
            while "Uvicorn running on" not in (line := proxy.stdout.readline()):
                said.append(line)
                assert line, "".join(said)[-4000:]
            rest.start()
            yield f"http://127.0.0.1:{port}"
        finally:
            proxy.terminate()
            if rest.ident is not None:
                rest.join()


@pytest.mark.parametrize("name", ["openai chat", "openai responses", "AI SDK, anthropic"])
def test_litellm_proxy_forwards_to_the_server(name: str, tmp_path: Path) -> None:
    client = CLIENTS[name]
    client.skip_if_missing()
    OPENAI["openai chat"].skip_if_missing()
    watched = Watched(client.outputs)
    for mode in client.modes:
        with (
            served(watched.open) as url,
            litellm_proxy(Place(scratch=tmp_path / mode / "proxy", url=url.rstrip("/"))) as proxy,
        ):
            told = client.run(Place(scratch=tmp_path / mode, url=proxy), mode)
        assert told["calls"] == [[name, arguments] for name, arguments in client.calls]
        assert told["answers"] == list(client.answers)
        watched.check(client, mode, told)
