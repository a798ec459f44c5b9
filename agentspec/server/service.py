"""What every route works with: the engine, the text pipeline, and the facts of this server. Knows no endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import msgspec

from agentspec.errors import RequestError
from agentspec.server.errors import ApiError
from agentspec.server.pipeline import TextPipeline
from agentspec.server.recorder import Figures
from agentspec.server.response_store import ResponseStore
from agentspec.server.tenants import NOBODY, Tenant, TenantEngine
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
"""Headers in which agents, routers and benchmark clients name the session, first come first served."""


ANY_NAME = "*"
"""A served name that stands for whatever a client asks for."""

_Asked = TypeVar("_Asked", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    engine: EngineClient
    text: TextPipeline | None
    """None for a checkpoint without a tokenizer: token-id prompts only."""
    figures: Figures
    """What `engine` measures: see recorder.py."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    """What /v1/responses keeps."""
    tenant: Tenant = NOBODY
    """Who asks. Stored responses are the tenant's alone, and so is what `engine` is asked for."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """All that there are, by name."""
    strict_fields: bool = False
    """Bodies with fields that nobody knows are refused."""
    max_open: int | None = None
    """Submits that may run or wait at the same time; None: any number."""
    drops_images: bool = False
    """The model reads that an image was there; without it images are refused by name."""
    root_path: str = ""
    """What clients write before every path."""
    unknown: UnknownFields = field(default_factory=UnknownFields)

    names: tuple[str, ...] = ()
    """What clients call the model; ANY_NAME may be among them. None: what the engine calls it."""

    def of(self, tenant: Tenant) -> Self:
        """What a request of this tenant works with."""
        if tenant is NOBODY:
            return self
        return replace(
            self, tenant=tenant, engine=TenantEngine(self.engine, tenant), responses=self.responses.of(tenant.name)
        )

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names that can be told, at least one. The first is the server's own word for its model."""
        return tuple(name for name in self.names if name != ANY_NAME) or (self.engine.info.model_id,)

    def answer_name(self, name: str) -> str:
        """The name of the model in the answer to a request for `name`. Raises ApiError for one that isn't served."""
        if ANY_NAME in self.names:
            return name
        listed = self.listed_names
        if name not in listed:
            served = ", ".join(map(repr, listed))
            raise ApiError(
                404, f"model={name!r}: not served here; this server has {served}", param="model", code="model_not_found"
            )
        return listed[0]

    def named(self, asked: _Asked) -> _Asked:
        """A request with the name that its answer carries as its `model`. Raises ApiError like `answer_name`."""
        name: str = asked.model  # type: ignore[attr-defined]
        return msgspec.structs.replace(asked, model=self.answer_name(name))

    def check_choices(self, field: str, count: int) -> None:
        """Raises ApiError for a request of more prompts and choices than may ever run and wait, before anything is done
        for it."""
        if self.max_open is not None and count > self.max_open:
            reason = f"{field}: {count} prompts and choices are more than may run and wait here, {self.max_open} (--max-running and --max-queue)"
            raise ApiError(429, reason, param=field, code="overloaded")

    def chat_text(self, field: str, value: object) -> TextPipeline:
        """The pipeline, for an endpoint that takes messages. Raises RequestError at a checkpoint that has no chat
        template."""
        if self.text is None or self.text.prompts is None:
            lacks = "tokenizer" if self.text is None else "chat template"
            raise RequestError(field, value, f"this checkpoint has no {lacks}: use /v1/completions")
        return self.text


def session_of(headers: Mapping[str, str], fallback: str | None) -> str | None:
    """The session that a request belongs to; `fallback` is the body's own word for it. Header names are lower case."""
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), fallback)
