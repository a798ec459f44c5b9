"""The chaos suite with small sizes, in seconds: answers, terminal events and counters.

`make chaos` has the full sizes, and also checks times and memory.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import bodies, half_open, hang_ups, kills, neighbours, restarts
from tests.chaos.arena import Outcome

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked at by /proc")

SHORT: dict[str, tuple[Callable[..., Coroutine[Any, Any, Outcome]], int]] = {
    "hang-ups": (hang_ups.run, 60),
    "half-open": (half_open.run, 84),
    "few-files": (half_open.few_files, 100),
    "bodies": (partial(bodies.run, huge=False), 1),
    "kills": (partial(kills.run, real_every=10**9), 4),
    "kills, tiny-agent": (partial(kills.run, real_every=1), 1),
    "restarts": (restarts.run, 2),
    "neighbours": (neighbours.run, 2),
}
"""Attacks with small sizes."""


@pytest.mark.parametrize("name", SHORT)
def test_attack_has_no_violations(name: str, tmp_path: Path) -> None:
    attack, size = SHORT[name]
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    log = tmp_path / "stderr"
    outcome = asyncio.run(attack(size, seed, log=log))
    assert not outcome.failures, "\n".join([f"{name}, seed {seed}", *outcome.failures, log.read_text()[-3000:]])
