"""The rule by which windows with copies share the rows of a forward, in plain Python.

Owns the definition. Steps run `Backend.open_window`, the same rule on tensors; tests compare each implementation with
this one. Knows nothing about tensors or tokens.

The host chooses how many rows a step has before it knows which slots have copies, so what one slot doesn't need goes to
the others.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_rows(wanted: Sequence[int], *, num_rows: int, own_columns: int) -> list[int]:
    """Return the number of live columns of each slot, in the order of the batch.

    wanted: the last emitted token and the drafts that were made for each slot; 0 for an inert one. num_rows: at least
    own_columns for each slot. Each first gets rows for its leading `own_columns`, then one after the other for the
    rest."""
    left = num_rows - sum(min(columns, own_columns) for columns in wanted)
    assert left >= 0, f"{num_rows} rows for {len(wanted)} slots with {own_columns} columns of their own"
    counts = []
    for columns in wanted:
        own = min(columns, own_columns)
        more = min(columns - own, left)
        left -= more
        counts.append(own + more)
    return counts
