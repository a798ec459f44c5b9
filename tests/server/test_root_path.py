"""A server under a path of a proxy's: one that strips the path and one that doesn't see the same server, in a browser,
too."""

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
    """What the proxy asks the server when a client asks it for `url`."""
    path = urlsplit(url).path
    assert path.startswith(ROOT)
    return await client.request(method, (path.removeprefix(ROOT) or "/") if strips else path, **options)


@BOTH_PROXIES
def test_both_kinds_of_proxy(strips: bool, pipeline: TextPipeline) -> None:
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
def test_the_page_finds_its_files(strips: bool, pipeline: TextPipeline) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        url = f"http://proxy{ROOT}"
        page = await through(client, strips, "GET", url)
        if page.status_code == 308:
            url = urljoin(url, page.headers["location"])
            page = await through(client, strips, "GET", url)
        else:
            url += "/"  # a proxy that strips a path sends browsers there itself
        assert page.status_code == 200
        files = re.findall(r'(?:href|src)="(static/[^"]+)"', page.text)
        assert files
        for file in files:
            assert (await through(client, strips, "GET", urljoin(url, file))).status_code == 200
        assert (await through(client, strips, "GET", urljoin(url, "v1/models"))).status_code == 200

    asked(served(pipeline, ServerConfig(root_path=ROOT)), ask)


def test_other_paths_stay_as_they_are(pipeline: TextPipeline) -> None:
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


def test_without_one_the_document_names_no_server(pipeline: TextPipeline) -> None:
    assert "servers" not in asked(served(pipeline, ServerConfig()), lambda client: client.get("/openapi.json")).json()


@pytest.mark.parametrize(
    "path",
    ["models", "/models/", "/", "//models", "/mod els", "/models?x", "/v1", "/v1/models", "/static", "/../models\n"],
)
def test_what_is_no_root_path(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path="):
        ServerConfig(root_path=path)
    ServerConfig(root_path="/v1x")
