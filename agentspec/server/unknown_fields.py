"""Unknown fields of bodies: counted, and logged once per client.

Clients can invent any number of names, so both are bounded. Knows no endpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

HEADER = "x-agentspec-ignored-fields"
"""The answer's header that lists the fields left out."""

OTHER = "other"
"""Stands for all names over the limit."""

_MOST_NAMES = 64
_MOST_TOLD = 1024
_MOST_IN_HEADER = 16
_PLAIN = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
"""Names allowed in a header and in a label."""

_log = logging.getLogger("agentspec")


class UnknownFields:
    """Counts since the server started."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Requests by field."""
        self._told: set[tuple[str, str]] = set()

    def note_fields(self, names: Sequence[str], *, path: str, client: str) -> str:
        """Count the fields of one request, and log those that this client has not sent before. Returns the header's
        value.

        client: its User-Agent."""
        shown = [name if _PLAIN.fullmatch(name) else OTHER for name in names]
        product = client.partition("/")[0][:64]
        for name in dict.fromkeys(shown):
            counted = name if name in self.counts or len(self.counts) < _MOST_NAMES else OTHER
            self.counts[counted] = self.counts.get(counted, 0) + 1
            if (name, product) not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add((name, product))
                _log.warning(
                    "%s: the field %s is unknown and was left out (client: %s)", path, name, product or "unnamed"
                )
        return ", ".join(dict.fromkeys(shown[:_MOST_IN_HEADER]))
