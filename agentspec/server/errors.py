"""How errors look to an HTTP client: OpenAI's body, a status, and the name of the field that caused it.

Owns the mapping from the exceptions of agentspec to statuses. 422 is never used: a wrong value is a 400 like any other.
"""

from __future__ import annotations

from typing import Any

from agentspec.errors import AgentspecError, ContextLengthError, EngineClosedError, RequestError

PUBLIC_NAMES = {"prompt_ids": "prompt", "prompt_logprobs": "logprobs"}
"""Fields of wire.Submit that a client knows by another name."""


class ApiError(Exception):
    """An answer that is not 200. `message` is for a person, `code` and `param` are for a program."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: AgentspecError) -> ApiError:
    """The HTTP answer to an error of agentspec."""
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        param = PUBLIC_NAMES.get(error.field, error.field)
        message = str(error).replace(error.field, param, 1)
        return ApiError(400, message, param=param, code=code)
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed")
    return ApiError(500, str(error), code="engine_error")
