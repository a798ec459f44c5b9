"""Who comes in: API keys, how many requests may run and wait, and nobody new while the server drains.

An ASGI app around the app. It decides before a body is read, and again when the body is there: a request counts from
then on. Knows nothing of what a request asks for.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.config import ServerConfig
from agentspec.errors import OverloadedError
from agentspec.server.bodies import Bodies, answer_unread, replayed
from agentspec.server.errors import ApiError, api_error
from agentspec.server.keys import Keys
from agentspec.server.responding import error_response
from agentspec.server.tenants import TENANT, Tenant

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Where a POST asks the engine to generate: what is counted, and refused while the server drains."""

LIVENESS, READINESS = "/live", "/ready"
PROBES = frozenset({"/health", "/ping", LIVENESS, READINESS})
"""Where load balancers and supervisors ask. LIVENESS: whether there is any need to start the server again: not while it
loads or drains. READINESS: whether another request would be taken. The others: whether requests may come."""

OPEN_PATHS = PROBES | {"/"}
OPEN_FOLDER = "/static/"
"""What needs no key: the page asks its user for one, and its files hold no secrets."""

RETRY_SECONDS = 1


class Door:
    """In front of one engine."""

    def __init__(self, app: ASGIApp, config: ServerConfig, *, max_running: int, keys: Keys | None = None) -> None:
        """max_running: requests that the engine decodes at the same time. keys: None: those of `config`."""
        self._app = app
        self._keys = Keys(config.api_keys, config.keys) if keys is None else keys
        self._max_active = max_running + config.max_queue
        self._bodies = Bodies(config.max_body_bytes)
        self._active = 0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[TENANT] = tenant = self._keys.tenant(scope["headers"])
        try:
            if (error := self._refusal(scope, tenant)) is None and tenant is not None and scope["method"] == "POST":
                receive = replayed(await self._bodies.read(scope, receive), receive)
                error = self._refusal(scope, tenant)  # others came in meanwhile
        except ApiError as refused:
            error = refused
        except ClientDisconnect:
            return
        if error is not None:
            await answer_unread(error_response(error, scope["path"]), scope, receive, send)
        elif tenant is not None and _generates(scope):
            self._active += 1
            tenant.num_inside += 1
            self._empty.clear()
            try:
                await self._app(scope, receive, send)
            finally:
                self._active -= 1
                tenant.num_inside -= 1
                if not self._active:
                    self._empty.set()
        else:
            await self._app(scope, receive, send)

    async def drain(self) -> None:
        """Refuse what generates from now on, and wait until the last answer is sent."""
        self._draining = True
        await self._empty.wait()

    def _refusal(self, scope: Scope, tenant: Tenant | None) -> ApiError | None:
        path = scope["path"]
        if tenant is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            reason = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY; there was none, or not the right one"
            return ApiError(401, reason, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if self._draining and (_generates(scope) or path in PROBES - {LIVENESS}):
            return ApiError(503, "the server is about to stop", code="draining")
        if path == READINESS and self._active >= self._max_active:
            return ApiError(503, f"{self._active} requests run or wait here, which is the limit", code="overloaded")
        if tenant is None or not _generates(scope):
            return None
        try:
            self._check_room(tenant)
            tenant.check()
        except OverloadedError as error:
            return api_error(error)
        return None

    def _check_room(self, tenant: Tenant) -> None:
        """Where there are several keys, none has more places than it leaves free: one that has nothing here always
        finds one."""
        free = self._max_active - self._active
        if free <= 0:
            raise OverloadedError(f"{self._active} requests run or wait here, which is the limit", RETRY_SECONDS)
        if len(self._keys.tenants) > 1 and tenant.num_inside >= free:
            reason = f"{tenant.num_inside} requests of the key {tenant.name!r} run or wait here: the {free} places left are for other keys"
            raise OverloadedError(reason, RETRY_SECONDS)


def _generates(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in GENERATING
