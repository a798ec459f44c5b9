"""`agentspec serve` with real processes and sockets: its output, its requests, and every kind of exit.

Both processes of a server have its stdout. So a test that reads the pipe to its end proves that both have ended. Where
no model is the subject, the engine's process is the light one of the chaos suite, which starts without torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.commands import cli

REAL = ["-c", "from agentspec.commands.cli import main; raise SystemExit(main())"]
LIGHT = ["-m", "tests.chaos.light_serve"]
FLAGS = ["serve", "--port", "0", "--device", "cpu", "--memory", "0.2"]
NAMED = ["--served-model-name", "tiny-agent"]
ENGINES = ("agentspec.engine.start", "tests.chaos.light_engine")
"""Modules of the engines' processes."""
CHAT: dict[str, Any] = {
    "model": "tiny-agent",
    "messages": [{"role": "user", "content": "Where is order 7?"}],
    "temperature": 0,
}
ENDLESS = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 8000}
"""Takes minutes to generate, so that a test that waited for its end would time out."""


ROOT = Path(__file__).resolve().parents[1]
BETWEEN_ASKS = 0.02
"""Seconds."""


class Served:
    """A running `agentspec serve`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        """folder: the directory of the code for the engine's process."""
        self.process = process
        self.folder = folder
        assert process.stdout is not None
        self.stdout = process.stdout
        self.page = ""
        self.client = httpx.Client(timeout=60)

    def read_page(self) -> None:
        """Read stdout up to the last line of the start page."""
        while "API key" not in self.page:
            line = self.stdout.readline()
            assert line, "the server ended before it served"
            self.page += line
        url = re.search(r"http://127\.0\.0\.1:\d+", self.page)
        assert url is not None
        self.client.base_url = httpx.URL(url.group())

    def wait_for(self, holds: Callable[[httpx.Response], bool], path: str = "/health", **post: Any) -> httpx.Response:
        """Ask again and again until the answer is as wanted. Not at once: the processes that are waited for need the
        processor. post: arguments of a POST."""
        while True:
            with suppress(httpx.ConnectError):
                answer = self.client.post(path, **post) if post else self.client.get(path)
                if holds(answer):
                    return answer
            with suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"the server ended with status {self.process.wait(BETWEEN_ASKS)}")

    def end(self) -> tuple[int, str, str]:
        """Wait for both processes; return the exit code, the rest of stdout, and stderr without the progress lines."""
        rest, errors = self.process.communicate()
        return self.process.returncode, rest, re.sub(r"^agentspec: .*, \d+ s\n", "", errors, flags=re.MULTILINE)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers and kills those that are left."""
    started: list[Served] = []

    def start(
        *flags: str, light: bool = False, in_engine: str = "", wait: bool = True, num_descriptors: int | None = None
    ) -> Served:
        """light: with the light engine. in_engine: code that the engine's process runs before it loads.
        num_descriptors: the server's limit."""
        environment = {name: value for name, value in os.environ.items() if name != "AGENTSPEC_API_KEY"}
        if in_engine:
            (tmp_path / "sitecustomize.py").write_text(
                f"import sys\nif not {{*{ENGINES}}}.isdisjoint(sys.orig_argv):\n    {in_engine}\n"
            )
            environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])])
        limited = [] if num_descriptors is None else ["sh", "-c", f'ulimit -n {num_descriptors} && exec "$@"', "sh"]
        command = [*limited, sys.executable, *(LIGHT if light else REAL), *FLAGS, *(NAMED if light else ()), *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        started.append(Served(process, tmp_path))
        if wait:
            started[-1].read_page()
        return started[-1]

    yield start
    for served in started:
        served.client.close()
        served.process.kill()
        served.process.communicate()


@contextmanager
def streaming(served: Served, body: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer, after the first one was read."""
    with served.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def reasons(lines: Iterator[str]) -> tuple[list[str], str]:
    """The finish reasons in the rest of a stream, and its last line."""
    rest = list(lines)
    bodies = [json.loads(line.removeprefix("data: ")) for line in rest if line != "data: [DONE]"]
    return [
        choice["finish_reason"] for body in bodies for choice in body.get("choices", ()) if choice["finish_reason"]
    ], rest[-1]


def test_a_server_prints_its_settings_and_serves_requests_with_the_key(serve: Serve) -> None:
    served = serve(
        "tiny-agent",
        "--api-key",
        "k1",
        "--api-key",
        "k2",
        "--max-body-mib",
        "0.01",
        "--max-context",
        "4096",
        "--draft-tokens",
        "2",
    )
    for words in (
        "serves tiny-agent",
        "cpu, float32",
        "4,096 tokens",
        "a token reads",
        "up to 2 a step, fixed",
        "8 run",
        "256 more",
        "0.01 MiB",
        "GiB",
        "rows",
        "pages",
        "can't contain control tokens",
    ):
        assert words in served.page
    assert "k1" not in served.page
    client = served.client
    assert client.get("/health").status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.post("/v1/chat/completions", json=ENDLESS).status_code == 401
    assert client.get("/v1/models", headers={"x-api-key": "k2"}).json()["data"][0]["max_model_len"] == 4096
    client.headers["authorization"] = "Bearer k1"
    answer = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 20, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 20
    with streaming(served, CHAT | {"stream": True, "max_tokens": 20, "ignore_eos": True}) as lines:
        assert reasons(lines) == (["length"], "data: [DONE]")
    refused = client.post("/v1/chat/completions", json=CHAT | {"top_k": 10**6})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_k")
    assert client.post("/v1/chat/completions", content=b" " * 20_000).status_code == 413
    assert client.get("/stats").json()["running"] == 0
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == (0, "", "")


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_hanging_chat_template_delays_only_its_requests(serve: Serve, tmp_path: Path) -> None:
    """It doesn't delay the end of the server either, whose text process is killed with it."""
    own = tmp_path / "own.jinja"
    own.write_text("{% if messages[0].content == 'hang' %}" + FOREVER + "{% endif %}{{ messages[0].content }}")
    served = serve("--chat-template", str(own), "--text-timeout", "3", "--drain", "0", light=True)
    client, hang = served.client, CHAT | {"messages": [{"role": "user", "content": "hang"}]}
    with streaming(served, ENDLESS) as lines, ThreadPoolExecutor() as pool:
        hanging = pool.submit(client.post, "/v1/chat/completions", json=hang)
        ids = {"model": "tiny-agent", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        for _ in range(3):
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=ids).json()["usage"]["completion_tokens"] == 3
            next(lines)
        refused = hanging.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "text_process")
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 3}).status_code == 200
        hanging = pool.submit(client.post, "/v1/chat/completions", json=hang)
        served.process.send_signal(signal.SIGTERM)
        assert reasons(lines) == (["abort"], "data: [DONE]")
        with suppress(httpx.TransportError):  # the signal may have been too late
            assert hanging.result().status_code == 503
    code, rest, errors = served.end()
    assert (code, rest) == (0, "")
    assert "took more than 3 seconds: its process is killed" in errors


def test_a_template_that_hangs_at_the_start_is_refused_within_its_deadline(serve: Serve, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(FOREVER)
    served = serve("./nowhere", "--chat-template", str(own), "--text-timeout", "1", light=True, wait=False)
    words = f"agentspec: error: {own}: the chat template did not end within 1 seconds (--text-timeout)\n"
    assert served.end() == (2, "", words)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_a_start_with_a_hanging_template(
    serve: Serve, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(FOREVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served = serve("--chat-template", str(own), "--port", str(port), "--text-timeout", "300", light=True, wait=False)
    served.client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
    served.wait_for(lambda health: True)
    served.process.send_signal(number)
    assert served.end() == (code, "", "")


def test_a_huge_text_is_refused_before_it_is_tokenised(serve: Serve) -> None:
    """The number of bytes shows that it is too long: the text process isn't used, and so isn't killed for it."""
    served = serve("--text-timeout", "5", light=True)
    max_context = served.client.get("/v1/models").json()["data"][0]["max_model_len"]
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * (24 << 20)}]}),
        ("completions", {"prompt": "a " * (12 << 20)}),
    ):
        refused = served.client.post(f"/v1/{path}", json={"model": "tiny-agent", **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert f"exceeds the context limit of {max_context} tokens" in refused.json()["error"]["message"]
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == (0, "", "")


def test_settings_for_clients_from_a_config_file(serve: Serve, tmp_path: Path) -> None:
    """A config file, model names, origins, a chat template and the log, over a real socket."""
    (tmp_path / "own.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (tmp_path / "serve.toml").write_text(
        "max-context = 512\ntrust-client-text = true\ncors-origin = '*'\n"
        "served-model-name = ['unused']\nlog-level = 'info'"
    )
    flags = (
        "--config",
        str(tmp_path / "serve.toml"),
        "--served-model-name",
        "gpt-x",
        "*",
        "--chat-template",
        str(tmp_path / "own.jinja"),
    )
    served = serve(*flags)
    client = served.client
    assert "gpt-x, *" in served.page
    assert "own.jinja" in served.page
    assert "TRUSTED: may contain control tokens" in served.page
    head = client.head("/v1/models/")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(client.get("/v1/models").content)
    body = CHAT | {"model": "whatever", "max_tokens": 5, "ignore_eos": True}
    answer = client.post(
        "/v1/chat/completions/", json=body, headers={"origin": "http://localhost:3000", "x-session-id": "s"}
    )
    assert (answer.json()["model"], answer.headers["access-control-allow-origin"]) == ("whatever", "*")
    assert client.post("/v1/chat/completions/render", json=CHAT).json()["prompt"] == "Where is order 7?"
    assert (
        client.post(
            "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "word " * 600}]}
        ).status_code
        == 400
    )
    assert client.get("/ready").json() == {"status": "ok"}
    served.process.send_signal(signal.SIGTERM)
    code, rest, log = served.end()
    assert (code, rest) == (0, "")
    prompt = answer.json()["usage"]["prompt_tokens"]
    request = (
        rf"POST /v1/chat/completions/ 200 session='s' prompt={prompt} cached=0 output=5 finish=length "
        r"first=\d+ms all=\d+ms id=[0-9a-f]{32}"
    )
    assert re.search(rf"^[-\d]+ [\d:,]+ INFO {request}$", log, re.MULTILINE)
    assert re.search(
        r"INFO POST /v1/chat/completions refused: 400 \w+: .*the context limit of 512 tokens id=[0-9a-f]{32}$",
        log,
        re.MULTILINE,
    )
    assert "HEAD /v1/models/ 200" in log
    assert "/ready" not in log


def test_keys_are_reloaded_on_sighup(serve: Serve, tmp_path: Path) -> None:
    def entry(name: str) -> str:
        return f'[{name}]\nhash = "{sha256(name.encode()).hexdigest()}"\n'

    file = tmp_path / "keys.toml"
    file.write_text(entry("alice"))
    served = serve("--keys", str(file), light=True)
    assert "required" in served.page

    def status(key: str) -> int:
        return served.client.get("/v1/models", headers={"x-api-key": key}).status_code

    assert (status("alice"), status("carol")) == (200, 401)
    with streaming(served, ENDLESS | {"max_tokens": 40}, {"x-api-key": "alice"}) as lines:
        file.write_text(entry("carol"))
        served.process.send_signal(signal.SIGHUP)
        while status("carol") != 200:
            pass
        assert status("alice") == 401
        assert reasons(lines) == (["length"], "data: [DONE]"), "running requests may end"
    file.write_text("[carol]\nhash = 7")
    served.process.send_signal(signal.SIGHUP)
    assert status("carol") == 200
    served.process.send_signal(signal.SIGTERM)
    code, _, errors = served.end()
    assert code == 0
    assert "the keys stay as they were" in errors
    assert "carol.hash" in errors


def test_idle_sockets_and_unfinished_bodies_do_not_block_others(serve: Serve) -> None:
    """Before the fix, 100 of the first kind blocked /health of a server with 64 descriptors, and 264 of the second kind
    blocked every request."""
    served = serve(light=True, num_descriptors=64)
    address = (served.client.base_url.host, served.client.base_url.port or 0)
    body = json.dumps(CHAT | {"max_tokens": 4}).encode()
    half = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body[:-1],
    )
    with ExitStack() as opened:
        for sent in [b""] * 100 + [half] * 264:
            opened.enter_context(socket.create_connection(address)).sendall(sent)
        assert httpx.get(f"{served.client.base_url}/health").status_code == 200
        assert served.client.post("/v1/chat/completions", content=body).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == (0, "", "")


def test_the_first_signal_drains_and_the_second_ends(serve: Serve) -> None:
    served = serve("--max-running", "1", "--max-queue", "0", light=True)
    with streaming(served, ENDLESS) as lines:
        refused = served.client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        served.process.send_signal(signal.SIGINT)
        served.wait_for(lambda health: health.status_code != 200)
        assert served.client.post("/v1/chat/completions", json=CHAT).status_code == 503
        served.process.send_signal(signal.SIGINT)
        assert reasons(lines) == (["abort"], "data: [DONE]")
    assert served.end() == (130, "", "")


def test_running_requests_may_end_within_the_drain_time(serve: Serve) -> None:
    served = serve(light=True)
    with streaming(served, ENDLESS | {"max_tokens": 30}) as lines:
        served.process.send_signal(signal.SIGTERM)
        assert reasons(lines) == (["length"], "data: [DONE]")
    assert served.end() == (0, "", "")


def test_the_engine_ends_with_its_server(serve: Serve) -> None:
    served = serve()
    with streaming(served, ENDLESS) as lines:
        served.process.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert served.end()[:2] == (-signal.SIGKILL, "")


def test_drain_0_ends_requests_at_once(serve: Serve) -> None:
    served = serve("--drain", "0", light=True)
    with streaming(served, ENDLESS) as lines:
        served.process.send_signal(signal.SIGTERM)
        assert reasons(lines) == (["abort"], "data: [DONE]")
    assert served.end() == (0, "", "")


def test_a_server_exits_when_its_engine_ended(serve: Serve) -> None:
    served = serve(light=True, in_engine="import os; print('engine', os.getpid(), flush=True)")
    engine = int(served.page.split()[1])
    with streaming(served, ENDLESS) as lines:
        os.kill(engine, signal.SIGKILL)
        assert "its process died" in json.loads(list(lines)[-1].removeprefix("data: "))["error"]["message"]
    code, rest, errors = served.end()
    assert (code, rest) == (70, "")
    assert errors == "the engine's process ended (killed by SIGKILL)\nagentspec: error: the engine ended by itself\n"


def test_with_restart_an_ended_engine_is_started_again_once(serve: Serve) -> None:
    """The server keeps its own state, and requests during the restart are told to retry."""
    waits = "gate = pathlib.Path(__file__).with_name('gate'); gate.exists() and gate.read_bytes()"
    served = serve(
        "--restart", light=True, in_engine=f"import os, pathlib; print('engine', os.getpid(), flush=True); {waits}"
    )
    client = served.client
    gate = served.folder / "gate"
    os.mkfifo(gate)
    stored = client.post(
        "/v1/responses", json={"model": "tiny-agent", "input": "Where is order 7?", "max_output_tokens": 16}
    ).json()
    with streaming(served, ENDLESS) as lines:
        os.kill(int(served.page.split()[1]), signal.SIGKILL)
        assert "its process died" in json.loads(list(lines)[-1].removeprefix("data: "))["error"]["message"]
    second = int(served.stdout.readline().split()[1])
    health = client.get("/health")
    assert (health.status_code, health.json()["status"], health.headers["retry-after"]) == (503, "loading", "2")
    assert client.post("/v1/chat/completions", json=CHAT).json()["error"]["code"] == "loading"
    assert client.get("/live").status_code == 200
    gate.write_bytes(b"")
    served.wait_for(lambda health: health.status_code == 200)
    assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 20}).status_code == 200
    assert client.get(f"/v1/responses/{stored['id']}").json() == stored
    os.kill(second, signal.SIGKILL)
    code, rest, errors = served.end()
    assert (code, rest) == (70, "")
    dead = "the engine's process ended (killed by SIGKILL)\n"
    assert errors == f"{dead}the engine is started again\n{dead}agentspec: error: the engine ended by itself\n"


def test_a_signal_ends_the_server_while_the_engine_restarts(serve: Serve) -> None:
    hangs = "(pathlib.Path(__file__).parent / 'hang').exists() and threading.Event().wait()"
    served = serve(
        "--restart",
        light=True,
        in_engine=f"import os, pathlib, threading; print('engine', os.getpid(), flush=True); {hangs}",
    )
    (served.folder / "hang").touch()
    os.kill(int(served.page.split()[1]), signal.SIGKILL)
    assert served.stdout.readline().startswith("engine")
    served.process.send_signal(signal.SIGTERM)
    code, rest, _ = served.end()
    assert (code, rest) == (0, "")


def test_a_stopped_engine_shows_in_health(serve: Serve) -> None:
    served = serve("--heartbeat", "4", light=True, in_engine="import os; print('engine', os.getpid(), flush=True)")
    engine = int(served.page.split()[1])
    os.kill(engine, signal.SIGSTOP)
    health = served.wait_for(lambda health: health.status_code != 200)
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stalled")
    assert served.client.get("/live").status_code == 503
    assert served.client.post("/v1/chat/completions", json=CHAT).status_code == 503
    os.kill(engine, signal.SIGCONT)
    served.wait_for(lambda answer: answer.status_code != 503, "/v1/chat/completions", json=CHAT | {"max_tokens": 4})
    assert served.client.get("/live").status_code == 200
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == (0, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_server_while_the_model_loads(serve: Serve, number: signal.Signals, code: int) -> None:
    served = serve(in_engine="import threading; print('loading', flush=True); threading.Event().wait()", wait=False)
    assert served.stdout.readline() == "loading\n"
    served.process.send_signal(number)
    assert served.end() == (code, "", "")


def test_a_loading_server_answers_503_and_ends_at_a_signal(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served = serve("--port", str(port), in_engine="import threading; threading.Event().wait()", wait=False)
    served.client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
    health = served.wait_for(lambda health: True)
    assert (health.status_code, health.headers["retry-after"]) == (503, "2")
    assert (health.json()["status"], health.json()["stage"]) == ("loading", "starting")
    answer = served.client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == (0, "", "")


def test_an_unloadable_model_is_reported(serve: Serve) -> None:
    served = serve("./nowhere", wait=False)
    assert served.end() == (2, "", "agentspec: error: model='./nowhere': no such directory\n")


def test_an_unusable_template_is_refused_before_loading(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for file, words in (
        (tmp_path / "none.jinja", "none.jinja: no such file"),
        (broken, "broken.jinja: not a valid chat template"),
    ):
        assert cli.main(["serve", "./nowhere", "--port", "0", "--chat-template", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_a_template_that_computes_its_control_tokens_is_refused(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% for message in messages %}{{ '<|' ~ 'im_start' ~ '|>' ~ message.content }}{% endfor %}"
    )
    code, page, log = serve("--chat-template", str(tmp_path / "own.jinja"), light=True, wait=False).end()
    assert (code, page) == (2, "")
    assert "own.jinja: control tokens that this chat template computes" in log
    assert "--trust-client-text" in log


def test_a_port_in_use_is_refused_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTSPEC_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "./nowhere", "--port", str(port)]) == 2
    assert f"port={port}: can't listen on 127.0.0.1" in capsys.readouterr().err


def test_the_server_does_not_import_torch() -> None:
    code = "import sys, agentspec.commands.serve\nprint('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
