"""The API keys: those of the command line, and those of a file that may change while the server runs.

Owns the file's format, and finding a request's tenant by its headers. What a tenant may do is in tenants.py.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from agentspec.config import read_toml
from agentspec.errors import ConfigError
from agentspec.server.tenants import NOBODY, Limits, Tenant

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
"""Names of keys and groups: TOML accepts these without quotes, and none contains a slash (Tenant.namespace)."""
_NAME_RULE = "must be 1 to 64 letters, digits, - and _"
_DIGEST = re.compile("[0-9A-Fa-f]{64}")
_NUMBERS = {"max-running": 1, "max-queue": 0, "tokens-per-minute": 1}
"""An entry's limits, each with its minimum."""
_FIELDS = ("hash", "group", *_NUMBERS)
_HIDDEN = "(hidden)"
"""Shown in errors in place of a value that might be a misplaced key."""

_log = logging.getLogger("agentspec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    name: str
    digests: tuple[bytes, ...]
    """SHA-256 of each key valid under this name: two while keys are rotated."""
    group: str | None = None
    limits: Limits


class Keys:
    """All keys of a server. Belongs to one event loop."""

    def __init__(
        self, api_keys: Sequence[str] = (), file: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """api_keys: each becomes a tenant, named by its position. Raises ConfigError naming file, entry, field and
        value."""
        self._plain = [
            Entry(name=f"api-key:{place}", digests=(sha256(key.encode("ascii")).digest(),), limits=Limits())
            for place, key in enumerate(dict.fromkeys(api_keys), start=1)
        ]
        self._file = file
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._by_digest: dict[bytes, Tenant] = {}
        self.tenants: dict[str, Tenant] = {}
        """By name; empty: no key is required. The dict itself is never replaced."""
        self._load()

    def reload(self) -> None:
        """Read the file again. If it is invalid, log the error and change nothing."""
        try:
            self._load()
        except ConfigError as error:
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.info("the keys were read again: %s", ", ".join(self.tenants))

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """The tenant of the key among a request's headers (names in lower case); None without a valid key. NOBODY if no
        keys are configured."""
        if not self.tenants:
            return NOBODY
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                value = value[7:].strip()
            elif name != b"x-api-key":
                continue
            found = self._by_digest.get(self._blinded(sha256(value).digest()))
            if found is not None:
                return found
        return None

    def _load(self) -> None:
        """Read the file and apply its entries. Nothing changes if it raises ConfigError."""
        entries = self._plain if self._file is None else [*self._plain, *read_entries(self._file)]
        owners: dict[bytes, str] = {}
        for entry in entries:
            for digest in entry.digests:
                if digest in owners:
                    raise ConfigError(
                        f"{self._file}: {entry.name}.hash", _HIDDEN, f"is that of {owners[digest]!r}, too"
                    )
                owners[digest] = entry.name
        for name in self.tenants.keys() - {entry.name for entry in entries}:
            del self.tenants[name]
        for entry in entries:
            self.tenants.setdefault(entry.name, Tenant(entry.name, self._clock)).set_limits(entry.group, entry.limits)
        self._by_digest = {self._blinded(digest): self.tenants[name] for digest, name in owners.items()}

    def _blinded(self, digest: bytes) -> bytes:
        """The lookup key of a digest. It depends on a secret, so that lookup times reveal nothing about the digests."""
        return hmac.digest(self._secret, digest, "sha256")


def read_entries(file: str) -> list[Entry]:
    """The entries of a key file: at least one. Raises ConfigError naming file, entry, field and value."""
    tables = read_toml("keys", file)
    if not tables:
        raise ConfigError("keys", file, "holds no key")
    return [_entry(f"{file}: {name}", name, table) for name, table in tables.items()]


def new_key(name: str) -> str:
    """A new random key and its entry, as text. Raises ConfigError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, _NAME_RULE)
    key = "agentspec-" + secrets.token_urlsafe(32)
    return f'# The key, which is kept nowhere:\n# {key}\n\n[{name}]\nhash = "{sha256(key.encode()).hexdigest()}"'


def _entry(place: str, name: str, table: Any) -> Entry:
    """place: the entry's name in errors."""
    if not _NAME.fullmatch(name):
        raise ConfigError(place, name, _NAME_RULE)
    if not isinstance(table, dict):
        raise ConfigError(place, _HIDDEN, f"must be a table: [{name}], and its fields below")
    for field, value in table.items():
        if field not in _FIELDS:
            raise ConfigError(
                f"{place}.{field}",
                _HIDDEN if isinstance(value, str) else value,
                f"is unknown; there are {', '.join(_FIELDS)}",
            )
    group = table.get("group")
    if group is not None and not (isinstance(group, str) and _NAME.fullmatch(group)):
        raise ConfigError(f"{place}.group", group, _NAME_RULE)
    for field, least in _NUMBERS.items():
        value = table.get(field, least)
        if type(value) is not int or not least <= value <= 10**12:
            raise ConfigError(f"{place}.{field}", value, f"must be a whole number from {least} to 10^12")
    if "max-queue" in table and "max-running" not in table:
        raise ConfigError(f"{place}.max-queue", table["max-queue"], "needs max-running: without it no request waits")
    limits = Limits(**{field.replace("-", "_"): table.get(field) for field in _NUMBERS})
    return Entry(name=name, digests=_digests(f"{place}.hash", table.get("hash")), group=group, limits=limits)


def _digests(place: str, value: Any) -> tuple[bytes, ...]:
    written = value if isinstance(value, list) else [value]
    if not written or not all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in written):
        raise ConfigError(
            place,
            _HIDDEN if value is not None else None,
            "must be the SHA-256 of the key in 64 hex digits, or a list of such",
        )
    return tuple(map(bytes.fromhex, written))
