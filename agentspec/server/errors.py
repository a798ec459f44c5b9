"""How errors look to an HTTP client: OpenAI's or Anthropic's body, a status, and the name of the field that caused it.

Owns the mapping from the exceptions of agentspec to statuses. 422 is never used: a wrong value is a 400 like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.errors import (
    AgentspecError,
    ContextLengthError,
    EngineClosedError,
    EngineStalledError,
    OverloadedError,
    RequestError,
    TextProcessError,
)

_ANTHROPIC_ROOT = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Other statuses are invalid_request_error below 500, and api_error from there on."""

PUBLIC_NAMES = {"prompt_ids": "prompt", "prompt_logprobs": "logprobs"}
"""Fields of wire.Submit that a client knows by another name."""


class ApiError(Exception):
    """An answer that is not 200. `message` is for a person, `code` and `param` are for a program."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        """reason: the message without the value, which may be a client's text. None: the message has no such value."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.for_log = f"{status} {message}" if reason is None else f"{status} {param}: {reason}"
        """In a log nobody expects what clients wrote: field and reason alone."""

    def body(self, path: str = "") -> dict[str, Any]:
        """In the shape of the API that the request's path belongs to."""
        if is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = (
            "server_error"
            if self.status >= 500
            else "rate_limit_error"
            if self.status == 429
            else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def is_anthropic(path: str) -> bool:
    """The path belongs to Anthropic's API."""
    return path == _ANTHROPIC_ROOT or path.startswith(_ANTHROPIC_ROOT + "/")


def api_error(error: AgentspecError) -> ApiError:
    """The HTTP answer to an error of agentspec."""
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        param = PUBLIC_NAMES.get(error.field, error.field)
        message = str(error).replace(error.field, param, 1)
        return ApiError(400, message, param=param, code=code, reason=error.reason)
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded", headers={"retry-after": str(error.retry_after)})
    if isinstance(error, EngineClosedError):
        return ApiError(
            503, str(error), code="engine_stalled" if isinstance(error, EngineStalledError) else "engine_closed"
        )
    if isinstance(error, TextProcessError):
        return ApiError(503, str(error), code="text_process")
    return ApiError(500, str(error), code="engine_error")
