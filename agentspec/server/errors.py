"""Errors as HTTP clients see them: OpenAI's or Anthropic's body, a status, and the name of the field at fault.

Owns the mapping from agentspec's exceptions to statuses. 422 is never used: a wrong value is a 400.
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

ANTHROPIC_ROOT = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Other statuses are invalid_request_error below 500, and api_error from 500 on."""

PUBLIC_NAMES = {"prompt_ids": "prompt", "prompt_logprobs": "logprobs"}
"""Fields of wire.Submit with another name in the API."""


class ApiError(Exception):
    """An answer other than 200. `message` is for people; `code` and `param` are for programs."""

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
        """reason: the message without the value, which may be a client's text. None: the message contains no such
        value."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.for_log = f"{status} {message}" if reason is None else f"{status} {param}: {reason}"
        """For the log: field and reason only, since clients' texts don't belong there."""

    def body(self, path: str = "") -> dict[str, Any]:
        """The body, in the shape of the API that the path belongs to."""
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
    """Whether the path belongs to Anthropic's API."""
    return path == ANTHROPIC_ROOT or path.startswith(ANTHROPIC_ROOT + "/")


def api_error(error: AgentspecError) -> ApiError:
    """The HTTP answer for an exception of agentspec."""
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
