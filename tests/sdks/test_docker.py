"""The image of the Dockerfile, built for CPUs, answers a chat. Skipped without docker.

The test is here and not in tests/, because building downloads packages.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_TORCH = "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if shutil.which("docker") is None:
        pytest.skip("no docker on this machine")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker is installed, but no daemon answers")
    name = f"agentspec-test:{uuid.uuid4().hex[:12]}"
    docker("build", "--build-arg", f"TORCH={CPU_TORCH}", "--tag", name, str(ROOT))
    yield name
    docker("image", "rm", "--force", name)


def test_docker_image_serves_a_chat(image: str) -> None:
    """The first output line is the start page, as without a container; reading it waits for the model."""
    name = f"agentspec-test-{uuid.uuid4().hex[:12]}"
    command = ["docker", "run", "--rm", "--init", "--publish", "127.0.0.1::8000", "--name", name, image]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        greeting = running.stdout.readline()
        assert "serves tiny-agent at" in greeting, f"it ended with {running.poll()}"
        try:
            url = f"http://{docker('port', name, '8000/tcp').splitlines()[0]}"
            body = {"model": "tiny-agent", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert httpx.get(f"{url}/live", timeout=60).status_code == 200, "what the image's health check asks"
            assert docker("exec", name, "id", "--user") != "0"
        finally:
            docker("stop", name)
        assert running.wait(timeout=60) == 0, "SIGTERM reaches the server"
