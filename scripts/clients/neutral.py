"""Words of one machine and one run, replaced by neutral ones, so that recordings can be kept. Everything else stays as
it was."""

from __future__ import annotations

import json
import platform
import re
from datetime import UTC, datetime
from typing import Any

from scripts.clients.agents import INSTALLED, ROOT, Place

_DAY = datetime(2026, 1, 1, tzinfo=UTC)

_UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9a-f])")
_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_MILLISECONDS = re.compile(r"\b1[789]\d{11}\b")


def neutral(requests: list[dict[str, Any]], place: Place) -> list[dict[str, Any]]:
    text = json.dumps(requests, ensure_ascii=False)
    now = datetime.now(UTC)
    words = {
        place.url: "http://127.0.0.1:8000",
        str(place.scratch): "/scratch",
        re.sub(r"\W|_", "-", str(place.scratch)): "-scratch",  # as Claude Code names a project
        str(INSTALLED): "/clients",
        str(ROOT): "/agentspec",
        platform.release(): "6.0.0",
        platform.version(): "#1 SMP",
        **dict(zip(_spellings(now), _spellings(_DAY), strict=True)),
    }
    for word, other in words.items():
        text = text.replace(json.dumps(word, ensure_ascii=False)[1:-1], other)
    ids: dict[str, str] = {}
    text = _UUID.sub(lambda found: ids.setdefault(found[0], f"00000000-0000-4000-8000-{len(ids):012d}"), text)
    text = _DIGEST.sub("0" * 64, text)
    text = _MILLISECONDS.sub(str(int(_DAY.timestamp() * 1000)), text)
    replaced: list[dict[str, Any]] = json.loads(text)
    return replaced


def _spellings(day: datetime) -> list[str]:
    """As agents write a date."""
    return [f"{day:%Y-%m-%d}", f"{day:%a %b %d %Y}", f"{day:%A, %B} {day.day}, {day.year}"]
