"""Tables for people, as text. Knows nothing of their contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], *, num_left: int) -> Iterator[str]:
    """The lines of a table whose columns are as wide as their widest cell. num_left: columns that are aligned to the
    left; the others are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
