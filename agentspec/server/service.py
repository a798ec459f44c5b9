"""The context of every route: the engine, the text pipeline, and the server's settings. Knows no endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import msgspec

from agentspec.errors import RequestError, cut_repr
from agentspec.server.errors import ApiError
from agentspec.server.pipeline import TextPipeline
from agentspec.server.recorder import Figures
from agentspec.server.response_store import ResponseStore
from agentspec.server.tenants import NOBODY, Tenant, TenantEngine
from agentspec.server.text_work import PromptFacts
from agentspec.server.unknown_fields import UnknownFields
from agentspec.wire import EngineClient

SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "x-smg-routing-key",
    "x-dynamo-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
)
"""Headers in which agents, routers and benchmark clients name the session, in order of precedence."""


ANY_NAME = "*"
"""A served name that matches every requested name."""

_Asked = TypeVar("_Asked", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    engine: EngineClient
    text: TextPipeline | None
    """None for a checkpoint without a tokenizer: token-id prompts only."""
    figures: Figures
    """Figures that `engine` records: see recorder.py."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    """Stored responses of /v1/responses."""
    tenant: Tenant = NOBODY
    """The tenant of the request. `engine` and `responses` are the tenant's own views."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """All tenants, by name."""
    strict_fields: bool = False
    """Refuse bodies with unknown fields."""
    max_open: int | None = None
    """Submits that may run or wait at the same time; None: no limit."""
    drops_images: bool = False
    """Replace images by a text; otherwise they are refused."""
    root_path: str = ""
    """The prefix that clients write before every path."""
    unknown: UnknownFields = field(default_factory=UnknownFields)

    names: tuple[str, ...] = ()
    """Names of the model; ANY_NAME may be among them. Empty: the engine's model id."""

    def of(self, tenant: Tenant) -> Self:
        """The service for a request of this tenant."""
        if tenant is NOBODY:
            return self
        return replace(
            self, tenant=tenant, engine=TenantEngine(self.engine, tenant), responses=self.responses.of(tenant.name)
        )

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names to list, at least one. The first is the server's own name for its model."""
        return tuple(name for name in self.names if name != ANY_NAME) or (self.engine.info.model_id,)

    def answer_name(self, name: str) -> str:
        """The model name in the answer to a request for `name`. Raises ApiError for a name that isn't served."""
        if ANY_NAME in self.names:
            return name
        listed = self.listed_names
        if name not in listed:
            served = ", ".join(map(repr, listed))
            raise ApiError(
                404,
                f"model={cut_repr(name)}: not served here; this server has {served}",
                param="model",
                code="model_not_found",
            )
        return listed[0]

    def named(self, asked: _Asked) -> _Asked:
        """The request, its `model` replaced by the name for its answer. Raises ApiError like `answer_name`."""
        name: str = asked.model  # type: ignore[attr-defined]
        return msgspec.structs.replace(asked, model=self.answer_name(name))

    def check_choices(self, field: str, count: int) -> None:
        """Raises ApiError for a request with more prompts and choices than may ever run and wait, before any work is
        done for it."""
        if self.max_open is not None and count > self.max_open:
            reason = (
                f"{field}: {count} prompts and choices are more than may run and wait here, {self.max_open} "
                "(--max-running and --max-queue)"
            )
            raise ApiError(429, reason, param=field, code="overloaded")

    def chat_text(self, field: str, value: object) -> tuple[TextPipeline, PromptFacts]:
        """The pipeline and its prompt builder, for an endpoint that takes messages. Raises RequestError for a
        checkpoint without a chat template."""
        if self.text is None or self.text.prompts is None:
            lacks = "tokenizer" if self.text is None else "chat template"
            raise RequestError(field, value, f"this checkpoint has no {lacks}: use /v1/completions")
        return self.text, self.text.prompts


def session_of(headers: Mapping[str, str], fallback: str | None) -> str | None:
    """The session of a request; `fallback` is the body's value. Header names are in lower case."""
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), fallback)
