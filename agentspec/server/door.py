"""Admission: API keys, a limit on running and waiting requests, and no new requests while the server drains.

An ASGI app around the app. It checks before it reads a body, and again when the body is complete; from then on a
request counts. Knows nothing of a request's contents.
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
"""Paths whose POST makes the engine generate: counted, and refused while the server drains."""

LIVENESS, READINESS = "/live", "/ready"
PROBES = frozenset({"/health", "/ping", LIVENESS, READINESS})
"""For load balancers and supervisors. LIVENESS: whether the server must be restarted (no while it loads or drains).
READINESS: whether one more request would be accepted. The others: whether the server accepts requests at all."""

OPEN_PATHS = PROBES | {"/"}
OPEN_FOLDER = "/static/"
"""Paths that need no key: the page asks its user for one, and its files contain no secrets."""

RETRY_SECONDS = 1


class Door:
    """The admission check in front of one engine."""

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
            self._check(scope, tenant)
            if tenant is not None and scope["method"] == "POST":
                receive = replayed(await self._bodies.read(scope, receive), receive)
                self._check(scope, tenant)  # other requests may have been admitted meanwhile
        except (ApiError, OverloadedError) as error:
            refusal = error if isinstance(error, ApiError) else api_error(error)
            await answer_unread(error_response(refusal, scope["path"]), scope, receive, send)
            return
        except ClientDisconnect:
            return
        if tenant is None or not _generates(scope):
            await self._app(scope, receive, send)
            return
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

    async def drain(self) -> None:
        """Refuse generating requests from now on, and wait until the last answer is sent."""
        self._draining = True
        await self._empty.wait()

    def _check(self, scope: Scope, tenant: Tenant | None) -> None:
        """Raises ApiError or OverloadedError for a request that isn't admitted."""
        path = scope["path"]
        if tenant is None and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            reason = (
                "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY; "
                "there was none, or not the right one"
            )
            raise ApiError(401, reason, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        is_read = scope["method"] in ("GET", "HEAD")
        if self._draining and (_generates(scope) or (is_read and path in PROBES - {LIVENESS})):
            raise ApiError(503, "the server is about to stop", code="draining")
        if is_read and path == READINESS and self._active >= self._max_active:
            raise ApiError(503, f"{self._active} requests run or wait here, which is the limit", code="overloaded")
        if tenant is not None and _generates(scope):
            self._check_room(tenant)
            tenant.check_limits()

    def _check_room(self, tenant: Tenant) -> None:
        """Check the limits. With several keys, a key may never hold more places than it leaves free, so a key without
        requests always finds a place."""
        free = self._max_active - self._active
        if free <= 0:
            raise OverloadedError(f"{self._active} requests run or wait here, which is the limit", RETRY_SECONDS)
        if len(self._keys.tenants) > 1 and tenant.num_inside >= free:
            reason = (
                f"{tenant.num_inside} requests of the key {tenant.name!r} run or wait here: "
                f"the {free} places left are for other keys"
            )
            raise OverloadedError(reason, RETRY_SECONDS)


def _generates(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in GENERATING
