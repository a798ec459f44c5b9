"""NVIDIA's benchmark client aiperf measures the bundled model over a socket, with the model's own tokenizer.

The real package runs in its own environment (`make aiperf`), because of its hundred dependencies. Without this
environment the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.server.service import session_of
from tests.server.loopback import bundled_app, served

AIPERF = Path(__file__).parents[2] / ".venv-aiperf" / "bin" / "aiperf"

SAMPLING = {
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.0,
    "presence_penalty": 1.5,
    "seed": 7,
    "chat_template_kwargs": {"preserve_thinking": True},
}
"""Request fields of MLPerf Endpoints' agentic benchmark; aiperf passes them on."""

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "chat": (4, {"max_completion_tokens": 24, **SAMPLING}),
    "responses": (2, {"max_output_tokens": 24}),
    "messages": (2, {"max_tokens": 24}),
}
"""Endpoint -> sessions of three turns, and the fields of each request."""

QUIET = {
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there, so that hub requests fail
    "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "300",
    "AIPERF_SERVICE_REGISTRATION_MAX_ATTEMPTS": "300",
    "AIPERF_SERVICE_PROFILE_START_TIMEOUT": "300",
}


class Watched:
    """The app of the bundled model; records session and status of every client request."""

    def __init__(self) -> None:
        self.sessions: Counter[str | None] = Counter()
        self.statuses: Counter[int] = Counter()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with bundled_app() as app:

            async def watched(scope: Any, receive: Any, send: Any) -> None:
                async def told(message: Any) -> None:
                    if message["type"] == "http.response.start" and scope["method"] == "POST":
                        self.sessions[
                            session_of({name.decode(): value.decode() for name, value in scope["headers"]}, None)
                        ] += 1
                        self.statuses[message["status"]] += 1
                    await send(message)

                await app(scope, receive, told)

            yield watched


def dialogues(path: Path, number: int) -> Path:
    """Return sessions of three turns; the first turn is long enough for the prefix cache."""
    orders = ", ".join(f"O-{4000 + place} is {'open' if place % 3 else 'sent'}" for place in range(40))
    lines = [
        {
            "session_id": f"s{index}",
            "turns": [
                {"text": f"List {index}: {orders}. Which are open?"},
                {"text": "And sent?", "delay": 10},
                {"text": "Bye"},
            ],
        }
        for index in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.skipif(
    not AIPERF.is_file(), reason=f"{AIPERF.parents[1].name} is not there: `make aiperf` installs aiperf"
)
@pytest.mark.parametrize("endpoint", RUNS)
def test_aiperf_measures_the_bundled_model(endpoint: str, tmp_path: Path) -> None:
    num_sessions, fields = RUNS[endpoint]
    watched = Watched()
    with served(watched.open) as url:
        command = [
            *(
                str(AIPERF),
                "profile",
                "--model",
                bundled.NAME,
                "--url",
                url.rstrip("/"),
                "--endpoint-type",
                endpoint,
                "--streaming",
            ),
            *("--tokenizer", str(bundled.DIRECTORY), "--extra-inputs", json.dumps(fields)),
            *(
                "--input-file",
                str(dialogues(tmp_path / "dialogues.jsonl", num_sessions)),
                "--custom-dataset-type",
                "multi_turn",
            ),
            *(
                "--conversation-num",
                str(num_sessions),
                "--concurrency",
                "2",
                "--workers-max",
                "1",
                "--record-processors",
                "1",
            ),
            *("--ui", "none", "--artifact-dir", str(tmp_path / "results")),
        ]
        environment = os.environ | QUIET | {"HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert watched.statuses == {200: 3 * num_sessions}
    assert sorted(watched.sessions.values()) == [3] * num_sessions, "each conversation is a session of its own"
    assert None not in watched.sessions
    result = json.loads((tmp_path / "results" / "profile_export_aiperf.json").read_text())
    assert (result["request_count"]["avg"], result["error_summary"]) == (3 * num_sessions, [])
    records = [
        json.loads(line)["metrics"] for line in (tmp_path / "results" / "profile_export.jsonl").read_text().splitlines()
    ]
    assert len(records) == 3 * num_sessions
    assert all(0 < record["output_sequence_length"]["value"] <= 24 for record in records)
    assert all(record["time_to_first_token"]["value"] > 0 for record in records)
    if endpoint == "chat":
        assert sum(record["usage_prompt_cache_read_tokens"]["value"] > 0 for record in records) >= 2 * num_sessions, (
            "later turns find their prefix"
        )
        assert result["usage_completion_tokens"]["avg"] <= 24
