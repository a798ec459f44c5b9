"""OpenAI's and Anthropic's own clients over an app in this process, for agent frameworks that embed the engine.

The SDKs are optional (the extra `sdks`) and imported only when a client is made.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from agentspec.errors import ConfigError
from agentspec.server.transport import transport_type

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

_ORIGIN = "http://in-process"
_SETTINGS: dict[str, Any] = {"api_key": "in-process", "timeout": None, "max_retries": 0}


def openai_client(app: FastAPI, **options: Any) -> AsyncOpenAI:
    """An `openai.AsyncOpenAI` without a socket; by default also without time limits and retries.

    `options` go to AsyncOpenAI. Raises ConfigError if the package isn't installed."""
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError as error:
        raise _missing("openai") from error
    return AsyncOpenAI(
        **{"base_url": f"{_ORIGIN}/v1", "http_client": _http(app, DefaultAsyncHttpxClient), **_SETTINGS, **options}
    )


def anthropic_client(app: FastAPI, **options: Any) -> AsyncAnthropic:
    """The same as `openai_client`, as an `anthropic.AsyncAnthropic`."""
    try:
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
    except ImportError as error:
        raise _missing("anthropic") from error
    return AsyncAnthropic(
        **{"base_url": _ORIGIN, "http_client": _http(app, DefaultAsyncHttpxClient), **_SETTINGS, **options}
    )


def _http(app: FastAPI, client_type: Any) -> Any:
    """The SDK's own HTTP client over the app. It is a client of httpx or of httpx2, depending on the SDK's version."""
    library = sys.modules[client_type.__mro__[1].__module__.partition(".")[0]]
    return client_type(transport=transport_type(library)(app))


def _missing(package: str) -> ConfigError:
    return ConfigError(
        "client", package, f"the {package} package isn't installed: install it, or agentspec with its extra `sdks`"
    )
