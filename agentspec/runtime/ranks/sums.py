"""Sums over what the device emitted, by which ranks that differ are found.

Every rank must emit the same: tokens, counts, lengths and checkpoint rows. Each slot has a running sum over all its
outcomes so far, so a difference is found by the next comparison, however many steps later, and names its slot."""

from __future__ import annotations

import zlib
from array import array

from agentspec.runtime.plan import StepOutcome


class SlotSums:
    """A rank's running sums: 32 bits for each slot."""

    def __init__(self, num_slots: int) -> None:
        self._sums = array("I", bytes(4 * num_slots))

    def add(self, outcome: StepOutcome) -> None:
        for slot in outcome.slots:
            newer, older = slot.checkpoints
            facts = [slot.num_drafted, slot.num_accepted, slot.stop, slot.length, *newer, *older, slot.matched]
            facts += [*slot.emitted, *slot.drafts]
            self._sums[slot.slot] = zlib.crc32(array("q", facts).tobytes(), self._sums[slot.slot])

    def copy(self) -> array[int]:
        return self._sums[:]


def first_difference(mine: array[int], theirs: array[int]) -> int | None:
    """The first slot whose sums differ; None: there is none."""
    return next((slot for slot, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
