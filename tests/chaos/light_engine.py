"""An engine process without torch and without a model: `python -m tests.chaos.light_engine FD`, in place of
agentspec.engine.start.

Scheduler, step loop, cache, engine thread and the link to the server are the real ones. Only the device is scripted: it
fails at the first row or page with wrong content, its next token is a function of all tokens before it, and a step
takes a given time. So an answer depends only on its prompt, a wrong one is detected, and a process starts within half a
second, with 50 MB.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from agentspec.runtime.plan import StepPlan

STEP_SECONDS = 0.01
"""Of every decode step."""
PAGES_VARIABLE, GATE_VARIABLE = "CHAOS_PAGES", "CHAOS_GATE_BYTES"
"""Environment variables: the number of pages, and the bytes that the sessions' working sets may use."""
MODEL = "light"
BLOCK = 64
NUM_PAGES = 600
NUM_ROWS = 120
MAX_RUNNING = 8
NUM_DRAFTS = 3
STOP_EVERY = 200
"""Average number of tokens after which a turn ends by itself."""


class _Absent(ModuleType):
    """Replaces a module that would load torch: any of its names is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@dataclass
class Parts:
    """The parts of an Assembly that an EngineThread uses."""

    config: Any
    spec: Any
    info: Any
    tokenizer: Any
    model_dir: Any
    cache: Any
    loop: Any
    constraints: Any
    ranks: None = None

    def close(self) -> None:
        """Nothing to release."""


sys.modules["torch"] = _Absent("torch")
sys.modules["agentspec.engine.assembly"] = _Absent("agentspec.engine.assembly")
sys.modules["agentspec.engine.assembly"].Assembly = Parts  # type: ignore[attr-defined]

from agentspec.cache import invariants  # noqa: E402
from agentspec.config import EngineConfig  # noqa: E402
from agentspec.engine import bundled, process  # noqa: E402
from agentspec.engine.link import EngineSetup  # noqa: E402
from agentspec.engine.thread import EngineThread  # noqa: E402
from agentspec.mtp.window_policy import FixedWindow  # noqa: E402
from agentspec.runtime.constraint_source import ConstraintSource  # noqa: E402
from agentspec.text.tokenizer import Tokenizer  # noqa: E402
from agentspec.types import DraftSource, ModelSpec, Progress, WindowShape  # noqa: E402
from agentspec.wire import ModelInfo  # noqa: E402
from tests.fakes import scripted_device  # noqa: E402


class LastPlan(list[StepPlan]):
    """Keeps only one plan, since a server runs for long."""

    def append(self, plan: StepPlan) -> None:
        self[:] = [plan]


class ChainDevice(scripted_device.ScriptedDevice):
    """The scripted device: the next token is a function of the whole sequence before it."""

    def __init__(self, words: list[int], stop_id: int, seconds: float) -> None:
        super().__init__(block=BLOCK, accept=lambda: NUM_DRAFTS)
        self.plans = LastPlan()
        # All allocated at the start, so that the device's bookkeeping doesn't grow during an attack.
        self._cells = dict.fromkeys(((page, place) for page in range(NUM_PAGES) for place in range(BLOCK)), 0)
        self._words, self._stop_id, self._seconds = words, stop_id, seconds

    def launch(self, plan: Any) -> Any:
        if plan.decode_slots:
            time.sleep(self._seconds)
        began = time.perf_counter()
        outcome = super().launch(plan)
        # For fair admission: the duration of the windows, and the time spent on checking the prompts.
        outcome.decode_seconds = self._seconds if plan.decode_slots else 0.0
        outcome.prefill_seconds = time.perf_counter() - began if plan.chunks else 0.0
        return outcome

    def _word(self, slot: Any, ahead: int) -> int:
        tag = slot.tags[-1]
        for _ in range(ahead):
            tag = hash((tag, self._word_after(slot, tag)))
        return self._word_after(slot, tag)

    def _word_after(self, slot: Any, tag: int) -> int:
        if tag % STOP_EVERY == 0 and self._stop_id in slot.join.stop_ids:
            return self._stop_id
        return self._words[tag // STOP_EVERY % len(self._words)]


class LiveHouse(scripted_device.House):
    """A House on the real clock that keeps no history."""

    now = property(lambda self: time.monotonic(), lambda self, value: None)

    def __init__(self, device: ChainDevice, config: EngineConfig) -> None:
        scripted_device.ScriptedDevice = lambda **_: device  # type: ignore[assignment, misc]
        super().__init__(
            rows=NUM_ROWS,
            pages=int(os.environ.get(PAGES_VARIABLE, NUM_PAGES)),
            gate_bytes=int(os.environ.get(GATE_VARIABLE, 10**9)),
            max_running=max_running(config),
            drafts=NUM_DRAFTS,
            budget=512,
            block=BLOCK,
            hold_seconds=0.5,
            overlap=config.overlap,
        )
        self.loop._window_policy = FixedWindow(WindowShape(NUM_DRAFTS))
        self.published, self.resumed = deque(maxlen=1), deque(maxlen=1)  # type: ignore[assignment]
        stats = self.cache.stats

        def checked_stats() -> dict[str, int]:
            invariants.check(self.cache)
            return stats()

        self.cache.stats = checked_stats  # type: ignore[method-assign]


def max_running(config: EngineConfig) -> int:
    return MAX_RUNNING if config.max_running == "auto" else config.max_running


def load(config: EngineConfig, progress: Progress) -> tuple[EngineThread, EngineSetup]:
    """The engine, whatever model the config names."""
    progress("loading", 1, 1)
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    control = set(tokenizer.special_ids.values())
    words = [token for token in range(500, 3000) if token not in control and tokenizer.decode([token]).isalpha()]
    stop_id = tokenizer.special_ids["<|im_end|>"]
    house = LiveHouse(ChainDevice(words, stop_id, STEP_SECONDS), config)
    spec = ModelSpec(
        name=MODEL,
        vocab_size=tokenizer.vocab_size,
        num_real_tokens=tokenizer.vocab_size,
        max_context=house._max_length,
        hidden_size=1,
        has_mtp=True,
        stop_token_ids=(stop_id,),
        row_bytes=scripted_device.ROW_BYTES,
        page_bytes=scripted_device.PAGE_BYTES,
        block_tokens=BLOCK,
    )
    info = ModelInfo(
        model_id=MODEL,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        stop_token_ids=spec.stop_token_ids,
        draft_sources=(DraftSource.MTP,) * NUM_DRAFTS,
        max_running=max_running(config),
    )
    constraints = ConstraintSource(None, refusal="is not served by the light engine")
    parts: Any = Parts(config, spec, info, tokenizer, bundled.DIRECTORY, house.cache, house.loop, constraints)
    setup = EngineSetup(
        model_dir=str(bundled.DIRECTORY),
        device="none",
        dtype="none",
        num_rows=NUM_ROWS,
        row_bytes=spec.row_bytes,
        num_pages=NUM_PAGES,
        page_bytes=spec.page_bytes,
        host_bytes=0,
        block_tokens=BLOCK,
        graphs="none",
        draft_vocabulary="nothing",
    )
    return EngineThread(parts), setup


if __name__ == "__main__":
    sys.exit(process.main(load))
