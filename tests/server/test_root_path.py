"""A server under a proxy's path prefix: with proxies that strip the prefix and those that don't, also in a browser."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.errors import ConfigError
from agentspec.server.pipeline import TextPipeline
from tests.server.test_front import COMPLETION, asked, served

ROOT = "/team/models"
BOTH_PROXIES = pytest.mark.parametrize("strips", [True, False])


async def through(client: httpx.AsyncClient, strips: bool, method: str, url: str, **options: Any) -> httpx.Response:
    """The proxy's request to the server for a client's `url`."""
    path = urlsplit(url).path
    assert path.startswith(ROOT)
    return await client.request(method, (path.removeprefix(ROOT) or "/") if strips else path, **options)


@BOTH_PROXIES
def test_stripping_and_non_stripping_proxies(strips: bool, pipeline: TextPipeline) -> None:
    config = ServerConfig(root_path=ROOT, api_keys=("key",), max_queue=0)

    async def ask(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/ready/", "/"):
            assert (await through(client, strips, "GET", ROOT + path)).status_code == 200, (
                "what needs no key is known by its own path"
            )
        assert (await through(client, strips, "GET", ROOT + "/v1/models")).status_code == 401
        client.headers["x-api-key"] = "key"
        assert (await through(client, strips, "GET", ROOT + "/v1/models")).json()["data"][0]["id"] == "scripted"
        for stream in (False, True):
            answer = await through(
                client, strips, "POST", ROOT + "/v1/completions", json=COMPLETION | {"stream": stream}
            )
            assert (answer.status_code, "well" in answer.text) == (200, True)
        assert (await through(client, strips, "POST", ROOT + "/v1/messages", json={})).json()["type"] == "error"
        document = (await through(client, strips, "GET", ROOT + "/openapi.json")).json()
        assert document["servers"] == [{"url": ROOT}]
        missing = await through(client, strips, "GET", ROOT + "/nothing")
        assert missing.status_code == 404

    asked(served(pipeline, config), ask)


@BOTH_PROXIES
def test_page_loads_its_files_under_a_prefix(strips: bool, pipeline: TextPipeline) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        url = f"http://proxy{ROOT}"
        page = await through(client, strips, "GET", url)
        if page.status_code == 308:
            url = urljoin(url, page.headers["location"])
            page = await through(client, strips, "GET", url)
        else:
            url += "/"  # a proxy that strips a path sends this redirect itself
        assert page.status_code == 200
        files = re.findall(r'(?:href|src)="(static/[^"]+)"', page.text)
        assert files
        for file in files:
            assert (await through(client, strips, "GET", urljoin(url, file))).status_code == 200
        assert (await through(client, strips, "GET", urljoin(url, "v1/models"))).status_code == 200

    asked(served(pipeline, ServerConfig(root_path=ROOT)), ask)


def test_paths_without_the_prefix_are_unchanged(pipeline: TextPipeline) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        for path in (
            "/team/modelsx/health",
            "/team/health",
            "/v1/team/models/health",
            "/team/models/team/models/health",
        ):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/health")).status_code == 200

    asked(served(pipeline, ServerConfig(root_path=ROOT)), ask)


def test_document_has_no_servers_without_a_prefix(pipeline: TextPipeline) -> None:
    assert "servers" not in asked(served(pipeline, ServerConfig()), lambda client: client.get("/openapi.json")).json()


@pytest.mark.parametrize(
    "path",
    ["models", "/models/", "/", "//models", "/mod els", "/models?x", "/v1", "/v1/models", "/static", "/../models\n"],
)
def test_invalid_root_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path="):
        ServerConfig(root_path=path)
    ServerConfig(root_path="/v1x")
