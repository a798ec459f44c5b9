"""Windows of different widths in one forward, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator

from agentspec.kernels.slots import LiveColumns


def live_rows(live: LiveColumns) -> Iterator[tuple[int, slice]]:
    """Yield the index of each active slot, with the rows of its live columns. Reads them on the host."""
    for slot, (first, count) in enumerate(zip(live.first_B.tolist(), live.count_B.tolist(), strict=True)):
        if count:
            yield slot, slice(first, first + count)
