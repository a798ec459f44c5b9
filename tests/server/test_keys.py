"""The key file: its format, reloading, and the limits of a key."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.commands import cli
from agentspec.config import ServerConfig
from agentspec.errors import ConfigError
from agentspec.server.app import create_app
from agentspec.server.door import Door
from agentspec.server.keys import Keys
from agentspec.server.transport import InProcessTransport
from tests.fakes.engine_client import ScriptedEngine, ended, said

COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": [1, 2], "max_tokens": 5}
MESSAGES: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}

Ask = Callable[[httpx.AsyncClient], Awaitable[None]]
Clock = Callable[[], float]


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def entry(name: str, *lines: str, key: str | None = None) -> str:
    return "\n".join([f"[{name}]", f'hash = "{digest(key or name)}"', *lines, ""])


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def found(keys: Keys, key: str) -> str | None:
    """The tenant name of a key."""
    tenant = keys.tenant([(b"x-api-key", key.encode())])
    return None if tenant is None else tenant.name


class Server:
    """A Door with keys from a file, in front of a scripted engine."""

    def __init__(
        self,
        directory: Path,
        text: str,
        engine: ScriptedEngine | None = None,
        clock: Clock = lambda: 0.0,
        **config: Any,
    ) -> None:
        self.file = directory / "keys.toml"
        self.file.write_text(text)
        self.engine = engine or ScriptedEngine([*said("abc"), ended()])
        self.keys = Keys((), str(self.file), clock)
        app = create_app(self.engine, None, tenants=self.keys.tenants)
        self.door = Door(app, ServerConfig(**config), max_running=8, keys=self.keys)

    def ask(self, ask: Ask) -> None:
        async def run() -> None:
            async with httpx.AsyncClient(
                transport=InProcessTransport(self.door), base_url="http://in-process", timeout=None
            ) as client:
                await ask(client)

        asyncio.run(run())


def test_entries_are_read_with_hash_group_and_limits(tmp_path: Path) -> None:
    engine = ScriptedEngine([*said("x"), ended()])
    text = (
        entry("alice")
        + entry("build-1", 'group = "fleet"')
        + entry("build-2", 'group = "fleet"', "max-running = 2", "max-queue = 0")
    )
    text += f'[bob]\nhash = ["{digest("old").upper()}", "{digest("new")}"]\ntokens-per-minute = 100\n'
    text += entry("fleet")
    server = Server(tmp_path, text, engine)

    async def ask(client: httpx.AsyncClient) -> None:
        for key in ("alice", "build-1", "build-2", "old", "new", "fleet"):
            assert (await client.post("/v1/completions", json=COMPLETION, headers=bearing(key))).status_code == 200
        for key in ("", "bob", digest("alice"), "build-3"):
            refused = await client.post("/v1/completions", json=COMPLETION, headers=bearing(key))
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")

    server.ask(ask)
    assert [submit.owner for submit in engine.submits] == ["alice", "build-1", "build-2", "bob", "bob", "fleet"]
    alice, build_1, build_2, old, new, fleet = [submit.namespace for submit in engine.submits]
    assert build_1 == build_2, "keys of one group share prefixes"
    assert old == new, "and so do the keys of one entry"
    assert len({alice, build_1, old, fleet}) == 4, "a group and a key of the same name are separate"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("[alice", "is not valid TOML"),
        ("alice = 'my-secret'", "alice='(hidden)': must be a table"),
        ("['a/b']\nhash = 'x'", "a/b='a/b': must be 1 to 64 letters"),
        ("[alice]", "alice.hash=None: must be the SHA-256"),
        ("[alice]\nhash = 'my-secret'", "alice.hash='(hidden)': must be the SHA-256"),
        ("[alice]\nhash = []", "alice.hash='(hidden)': must be the SHA-256"),
        (
            "[alice]\nkey = 'my-secret'",
            "alice.key='(hidden)': is unknown; there are hash, group, max-running, max-queue, tokens-per-minute",
        ),
        (entry("alice", "max_running = 3"), "alice.max_running=3: is unknown"),
        (entry("alice", "max-running = 0"), "alice.max-running=0: must be a whole number from 1"),
        (entry("alice", "max-running = true"), "alice.max-running=True: must be a whole number"),
        (entry("alice", "tokens-per-minute = 1.5"), "alice.tokens-per-minute=1.5: must be a whole number"),
        (entry("alice", "tokens-per-minute = '9'"), "alice.tokens-per-minute='9': must be a whole number"),
        (entry("alice", "max-queue = 1"), "alice.max-queue=1: needs max-running"),
        (entry("alice", "group = 'a/b'"), "alice.group='a/b': must be 1 to 64 letters"),
        (entry("alice", "group = 7"), "alice.group=7: must be"),
        (entry("alice") + entry("bob", key="alice"), "bob.hash='(hidden)': is that of 'alice', too"),
        (entry("bob", key="plain"), "bob.hash='(hidden)': is that of 'api-key:1', too"),
    ],
)
def test_invalid_key_file_error_names_entry_field_and_value(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Keys(("plain",), str(file))
    assert words in str(refused.value)
    assert str(file) in str(refused.value)
    assert "my-secret" not in str(refused.value)


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        Keys((), str(tmp_path / "none.toml"))
    (tmp_path / "latin.toml").write_bytes(b'[a]\ngroup = "\xe9"')
    with pytest.raises(ConfigError, match="is not valid TOML"):
        Keys((), str(tmp_path / "latin.toml"))


def test_new_key_matches_the_hash_of_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "new", "alice"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "keys.toml").write_text(shown)
    key = next(line for line in shown.splitlines() if line.startswith("# agentspec-")).removeprefix("# ")
    keys = Keys((), str(tmp_path / "keys.toml"))
    assert (found(keys, key), found(keys, "agentspec-")) == ("alice", None)
    assert cli.main(["keys", "new", "alice"]) == 0
    assert tomllib.loads(capsys.readouterr().out) != tomllib.loads(shown)
    assert cli.main(["keys", "new", "a/b"]) == 2
    assert "name='a/b': must be 1 to 64 letters" in capsys.readouterr().err


def test_keys_are_reloaded_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()
    server = Server(tmp_path, entry("alice") + entry("bob"), ScriptedEngine([*said("first"), go_on, ended()]))

    async def ask(client: httpx.AsyncClient) -> None:
        async def status(key: str) -> int:
            return (await client.get("/v1/models", headers=bearing(key))).status_code

        _, frames = await opened(client, "alice")
        server.file.write_text(entry("bob", key="new") + entry("carol"))
        assert [await status(key) for key in ("alice", "bob", "carol", "new")] == [200, 200, 401, 401], (
            "the file was not read again yet"
        )
        server.keys.reload()
        assert [await status(key) for key in ("alice", "bob", "carol", "new")] == [401, 401, 200, 200]
        for wrong in ("", "[carol", "[carol]\nhash = 1", entry("carol") + entry("dave", key="carol")):
            server.file.write_text(wrong)
            server.keys.reload()
            assert "the keys stay as they were" in caplog.messages[-1]
            assert str(server.file) in caplog.messages[-1]
            assert [await status(key) for key in ("alice", "bob", "carol", "new")] == [401, 401, 200, 200]
        server.file.unlink()
        server.keys.reload()
        assert await status("new") == 200
        go_on.set()
        assert "[DONE]" in "".join([text async for text in frames]), "running requests of a removed key may finish"

    with caplog.at_level(logging.ERROR, "agentspec"):
        server.ask(ask)
    assert len(caplog.messages) == 5


async def opened(client: httpx.AsyncClient, key: str) -> tuple[httpx.Response, AsyncIterator[str]]:
    """A stream whose first frame has arrived."""
    request = client.build_request("POST", "/v1/completions", json=COMPLETION | {"stream": True}, headers=bearing(key))
    response = await client.send(request, stream=True)
    assert response.status_code == 200
    frames = response.aiter_text()
    await anext(frames)
    return response, frames


async def settle() -> None:
    """Run all callbacks that are due."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_requests_over_max_running_wait_and_over_max_queue_are_429(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([*said("first"), go_on, ended()])
    server = Server(tmp_path, entry("alice", "max-running = 2", "max-queue = 2") + entry("bob"), engine)

    async def ask(client: httpx.AsyncClient) -> None:
        streams = [await opened(client, "alice") for _ in range(2)]
        waiting = [asyncio.create_task(opened(client, "alice")) for _ in range(2)]
        await settle()
        assert len(engine.submits) == 2
        for path, body, kind in (
            ("/v1/completions", COMPLETION, "rate_limit_error"),
            ("/v1/messages", MESSAGES, "rate_limit_error"),
        ):
            refused = await client.post(path, json=body, headers=bearing("alice"))
            assert (refused.status_code, refused.headers["retry-after"], refused.json()["error"]["type"]) == (
                429,
                "1",
                kind,
            )
            assert "max-running=2, max-queue=2" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models", headers=bearing("alice"))).status_code == 200
        streams.append(await opened(client, "bob"))
        assert len(engine.submits) == 3, "other keys are not affected"
        waiting[0].cancel()
        await settle()
        waiting.append(asyncio.create_task(opened(client, "alice")))
        await settle()
        assert len(engine.submits) == 3, "a disconnect frees a place in the queue"
        await streams[0][0].aclose()
        streams.append(await waiting[1])
        assert len(engine.submits) == 4, "a disconnect frees a place, and the oldest waiting request gets it"
        assert not waiting[2].done()
        go_on.set()
        streams.append(await waiting[2])
        for _, frames in streams[1:]:
            assert "[DONE]" in "".join([text async for text in frames])
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearing("alice"))).status_code == 200

    server.ask(ask)
    assert server.keys.tenants["alice"].num_refused == 2


def test_prompts_and_choices_count_separately_against_key_limits(tmp_path: Path) -> None:
    """Otherwise a request with 2,048 prompts would count as one."""
    engine = ScriptedEngine([*said("x"), ended()])
    server = Server(
        tmp_path, entry("alice", "max-running = 2") + entry("bob", "max-running = 2", "max-queue = 3"), engine
    )

    async def ask(client: httpx.AsyncClient) -> None:
        body = COMPLETION | {"prompt": [[1], [2, 3], [4]], "n": 2}
        assert len((await client.post("/v1/completions", json=body, headers=bearing("alice"))).json()["choices"]) == 6
        refused = await client.post("/v1/completions", json=body, headers=bearing("bob"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.post("/v1/completions", json=body | {"n": 1}, headers=bearing("bob"))).status_code == 200

    server.ask(ask)
    assert len(engine.aborted) <= 2, "the rest never reached the engine"
    alice = server.keys.tenants["alice"]
    assert (alice.num_requests, alice.prompt_tokens, alice.output_tokens) == (6, 4, 6), (
        "the prompt of several choices counts once"
    )


def test_key_can_not_take_all_places(tmp_path: Path) -> None:
    """Eight places: a key that takes as many as it can doesn't lock out the others."""
    go_on = asyncio.Event()
    engine = ScriptedEngine([*said("first"), go_on, ended()])
    server = Server(tmp_path, "".join(map(entry, ("alice", "bob", "carol"))), engine, max_queue=0)

    async def ask(client: httpx.AsyncClient) -> None:
        streams = []
        for key, num_places in (("alice", 4), ("bob", 2), ("carol", 1)):
            streams += [await opened(client, key) for _ in range(num_places)]
            refused = await client.post("/v1/completions", json=COMPLETION, headers=bearing(key))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert f"of the key '{key}' run or wait here" in refused.json()["error"]["message"]
        await streams[0][0].aclose()
        await streams[1][0].aclose()
        streams.append(await opened(client, "carol"))
        go_on.set()
        for _, frames in streams[2:]:
            assert "[DONE]" in "".join([text async for text in frames])
        assert {tenant.num_inside for tenant in server.keys.tenants.values()} == {0}

    server.ask(ask)


def test_excess_tokens_delay_later_requests(tmp_path: Path) -> None:
    now = 1000.0
    engine = ScriptedEngine([*said("x" * 88), ended()])
    server = Server(tmp_path, entry("alice", "tokens-per-minute = 60") + entry("bob"), engine, lambda: now)

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal now

        async def asked(key: str = "alice") -> httpx.Response:
            return await client.post("/v1/completions", json=COMPLETION, headers=bearing(key))

        now += 3600
        assert (await asked()).status_code == 200, "2 + 88 tokens: 30 over the limit"
        refused = await asked()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "31")
        assert "tokens-per-minute=60" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models", headers=bearing("alice"))).status_code == 200
        assert (await asked("bob")).status_code == 200
        now += 30
        assert (await asked()).headers["retry-after"] == "1"
        now += 1
        assert (await asked()).status_code == 200
        assert (await asked()).headers["retry-after"] == "90"
        server.keys.reload()
        assert (await asked()).headers["retry-after"] == "90", "reloading the file keeps the excess"
        server.file.write_text(entry("alice", "tokens-per-minute = 600") + entry("bob"))
        server.keys.reload()
        assert (await asked()).status_code == 200, "a new limit resets the count"

    server.ask(ask)


def test_changed_max_running_applies_to_new_requests(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    engine = ScriptedEngine([*said("first"), go_on, ended()])
    server = Server(tmp_path, entry("alice", "max-running = 1", "max-queue = 0"), engine)

    async def ask(client: httpx.AsyncClient) -> None:
        streams = [await opened(client, "alice")]
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearing("alice"))).status_code == 429
        server.file.write_text(entry("alice"))
        server.keys.reload()
        streams += [await opened(client, "alice") for _ in range(3)]
        go_on.set()
        for _, frames in streams:
            assert "[DONE]" in "".join([text async for text in frames])

    server.ask(ask)


def test_metrics_have_counters_per_key(tmp_path: Path) -> None:
    server = Server(tmp_path, entry("alice") + entry("bob", "max-running = 1", "tokens-per-minute = 1"))

    async def ask(client: httpx.AsyncClient) -> None:
        for key in ("alice", "alice", "bob", "bob"):
            await client.post("/v1/completions", json=COMPLETION, headers=bearing(key))
        text = (await client.get("/metrics", headers=bearing("alice"))).text
        for line in (
            'key_requests_total{model_name="scripted",key="alice"} 2',
            'key_requests_total{model_name="scripted",key="bob"} 1',
            'key_requests_refused_total{model_name="scripted",key="bob"} 1',
            'key_tokens_total{model_name="scripted",key="alice",kind="prompt"} 4',
            'key_tokens_total{model_name="scripted",key="alice",kind="output"} 6',
        ):
            assert f"agentspec_{line}\n" in text

    server.ask(ask)
