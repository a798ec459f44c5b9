"""The rows of the target head and of the draft head that a rank holds. A single rank holds them all.

Both heads are shared by vocabulary. The target head is cut in equal runs of ids. The draft head's ids lie all over it,
so each rank drafts from an equal run of these ids, whichever rank has their rows in the target head. The embedding is
whole on every rank, and a tied head is a view of it.

Shape letters: N rows at a time, O rows of the draft head, V rows of a rank's target head, H hidden size, C numbers of a
row (`Weight.to_numbers`), S ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec import kernels

GATHERED = 2**22
"""Most values of a rank that one call gathers while a draft head is made."""


def rows_of_tied_head(embedding_VH: Tensor, group: kernels.Group | None) -> Tensor:
    """A rank's rows of a head that is the embedding."""
    if group is None:
        return embedding_VH
    num_rows = len(embedding_VH) // group.size
    return embedding_VH[group.rank * num_rows : (group.rank + 1) * num_rows]


def draft_rows(
    head_VH: kernels.Weight,
    embedding_VH: Tensor,
    ids: Sequence[int],
    num_real: int,
    group: kernels.Group | None,
    *,
    tied: bool,
) -> tuple[kernels.Weight, Tensor | None]:
    """A rank's rows of the draft head, and their tokens, int64 [O] (None: row o is token o). The rows are in the target
    head's form if that can draft, and then a view of it if all real tokens are drafted; else plain, in the embedding's
    dtype.

    head_VH: the rank's rows of the target head. tied: they are the embedding's. ids: as in StepModel.limit_drafts. With
    several ranks, all must call this with the same ids."""
    device, num_rows, dtype = head_VH.device, head_VH.shape[0], embedding_VH.dtype
    first = 0 if group is None else group.rank * num_rows
    last_first = 0 if group is None else (group.size - 1) * num_rows
    if len(ids) == num_real > last_first:
        num_mine = min(num_real - first, num_rows)
        ids_O = None if group is None else torch.arange(first, first + num_mine, device=device)
        if head_VH.can_draft:
            return head_VH.cut((slice(0, num_mine),)), ids_O
        return _some_rows(head_VH, torch.arange(num_mine, device=device), dtype), ids_O
    mine = _share(len(ids), group)
    ids_O = torch.tensor(ids[mine], dtype=torch.int64, device=device)
    if group is None or tied:
        # Their rows lie all over the head: a copy can be read at full bandwidth, and is, once for every draft.
        return _some_rows(kernels.Plain(embedding_VH) if tied else head_VH, ids_O, dtype), ids_O
    return _gathered_rows(head_VH, ids, mine, group, dtype), ids_O


def _some_rows(head_VH: kernels.Weight, ids_O: Tensor, dtype: torch.dtype) -> kernels.Weight:
    """Copies of rows of a head, in a form that can draft."""
    rows_OH = head_VH.select_rows(ids_O)
    return rows_OH if rows_OH.can_draft else kernels.Plain(rows_OH.dequantize(dtype))


def draft_head_bytes(rows: kernels.Weight, ids_O: Tensor | None, head_VH: kernels.Weight) -> int:
    """Memory of a draft head besides the target head: its rows, where they aren't a view of it, and their tokens."""
    is_view = rows.values.untyped_storage()._cdata == head_VH.values.untyped_storage()._cdata
    return (0 if is_view else rows.nbytes) + (0 if ids_O is None else ids_O.nbytes)


def _share(num_ids: int, group: kernels.Group | None) -> slice:
    """A rank's run of the draft head's ids: all equal but the last, in whole blocks of multipliers if every rank then
    has some. With too few ids the last ranks repeat the last id, so that every rank has one."""
    if group is None:
        return slice(0, num_ids)
    each = -(-num_ids // group.size)
    in_blocks = -(-each // kernels.SCALE_BLOCK) * kernels.SCALE_BLOCK
    if in_blocks * (group.size - 1) < num_ids:
        each = in_blocks
    first = min(group.rank * each, num_ids - 1)
    return slice(first, min(first + each, num_ids))


def _gathered_rows(
    head_VH: kernels.Weight, ids: Sequence[int], mine: slice, group: kernels.Group, dtype: torch.dtype
) -> kernels.Weight:
    """Rows `mine` of the ids' rows, [O, H]. Ranks show each other all rows, and each keeps its own."""
    num_rows, device = head_VH.shape[0], head_VH.device
    one = _some_rows(head_VH, torch.zeros(1, dtype=torch.int64, device=device), dtype)
    rows_OH = one.select_rows(torch.zeros(mine.stop - mine.start, dtype=torch.int64, device=device))
    size = max(1, GATHERED // one.to_numbers().shape[1])
    for first in range(0, len(ids), size):
        ids_N = torch.tensor(ids[first : first + size], dtype=torch.int64, device=device)
        shown = _some_rows(head_VH, (ids_N - group.rank * num_rows).clamp(0, num_rows - 1), dtype)
        all_NSC = group.gather_columns(shown.to_numbers()).view(len(ids_N), group.size, -1)
        start, stop = max(mine.start, first), min(mine.stop, first + len(ids_N))
        if start < stop:
            place_N = torch.arange(start - first, stop - first, device=device)
            found = one.from_numbers(all_NSC[place_N, ids_N[place_N] // num_rows])
            rows_OH.fill((slice(start - mine.start, stop - mine.start),), found)
    return rows_OH
