"""A model's state between calls: the form of each layer's state, and the pools that are allocated from these forms.

Ids are only pointers here; the cache decides which request owns a row or page.

Shape letters: L layers that have a part, R rows, P pages, H hidden size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from agentspec.types import ZERO_ROW

Memory = tuple[Tensor, ...]
"""One layer's state: the tensors of its row parts, [R, ...], then those of its page parts, [P, ...], then those of its
ring parts, [S slots, C entries, ...], if slots have rings; in the order of its form."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a layer stores for every row, or for every page."""

    name: str
    """Name of the pool that stores it for all layers, [layers that have it, rows or pages, *shape]. Parts of one name
    must have one shape and dtype."""
    shape: tuple[int, ...]
    """Of one row or page in one layer."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StateForm:
    """A layer's state between calls.

    Each window column has its own row:

    - A request owns the rows that `types.rows_of_request` counts. A slot needs no other memory.
    - A window reads the slot's read row, and writes the whole state after column t to its t-th write row.
    - A commit makes the write row of the last accepted column the new read row. No state is copied; the rows of
      rejected columns are overwritten later.

    A form with ring parts can also store less. Each slot then has a ring, in which each token leaves an entry: what it
    added to the state.

    - A window reads the slot's read row and the entries behind it. It writes an entry for each column.
    - Where a sequence crosses a multiple of `RingShape.fold_tokens`, the next window stores the whole state there, to a
      row of the request. The commit of that step makes it the read row.
    - A commit otherwise changes lengths only. Entries of rejected columns are overwritten later.

    Pages store data of each token at its position; a window writes the positions of its columns. Rejected positions are
    written again before they are read. Only the model knows which layer has which parts: cache and scheduler work on
    ids and lengths."""

    row_parts: tuple[Part, ...] = ()
    page_parts: tuple[Part, ...] = ()
    ring_parts: tuple[Part, ...] = ()
    """Of one token, where slots have rings."""


def hidden_form(hidden_size: int, dtype: torch.dtype) -> StateForm:
    """State of the model itself: the last token's hidden after the final norm."""
    return StateForm(
        row_parts=(Part("hidden_LRH", (hidden_size,), dtype),),
        ring_parts=(Part("ring_hidden_LSCH", (hidden_size,), dtype),),
    )


def row_bytes(forms: Iterable[StateForm]) -> int:
    """Bytes of one state row over all layers."""
    return sum(part.nbytes for form in forms for part in form.row_parts)


def page_bytes(forms: Iterable[StateForm]) -> int:
    """Bytes of one page over all layers."""
    return sum(part.nbytes for form in forms for part in form.page_parts)


def entry_bytes(forms: Sequence[StateForm]) -> int:
    """Bytes of one token's entry in a ring over all layers; 0: some layer stores rows and can't use rings."""
    if any(form.row_parts and not form.ring_parts for form in forms):
        return 0
    return sum(part.nbytes for form in forms for part in form.ring_parts)


class Rings(NamedTuple):
    """How many rings there are."""

    num_slots: int
    """Including the padding slot."""
    capacity: int
    """Entries of each: RingShape.capacity."""


class StatePools:
    """The state of every layer, for all rows, pages and rings. `pools["ssm_LRVDK"]` is one part for the layers that
    have it, in layer order."""

    def __init__(
        self,
        forms: Sequence[StateForm],
        *,
        num_rows: int,
        num_pages: int,
        rings: Rings | None = None,
        device: torch.device,
    ) -> None:
        """forms: of every layer in order, with `hidden_form` as the last. rings: None: slots have no rings. ZERO_ROW is
        zeroed, everything else is uninitialised."""
        self._rows = _allocate((form.row_parts for form in forms), (num_rows,), device)
        self._pages = _allocate((form.page_parts for form in forms), (num_pages,), device)
        self._rings = {} if rings is None else _allocate((form.ring_parts for form in forms), rings, device)
        for pool in self._rows.values():
            pool[:, ZERO_ROW] = 0
        layers = {name: iter(pool) for name, pool in (self._rows | self._pages | self._rings).items()}

        def memory(form: StateForm) -> Memory:
            ring_parts = form.ring_parts if rings else ()
            return tuple(next(layers[part.name]) for part in (*form.row_parts, *form.page_parts, *ring_parts))

        *self.layers, hidden = [memory(form) for form in forms]
        self.hidden_RH = hidden[0]
        self.hidden_SCH = hidden[1] if rings else None
        """Rings of hiddens; None: slots have no rings."""

    def __getitem__(self, name: str) -> Tensor:
        return (self._rows | self._pages | self._rings)[name]

    def tensors(self) -> tuple[Tensor, ...]:
        return *self._rows.values(), *self._pages.values(), *self._rings.values()

    def row_tensors(self) -> tuple[Tensor, ...]:
        """One tensor per pool and layer, so that element r of each is contiguous: a part of row r."""
        return tuple(chain.from_iterable(pool.unbind() for pool in self._rows.values()))

    def page_tensors(self) -> tuple[Tensor, ...]:
        """The same for pages; consecutive pages are adjacent in memory."""
        return tuple(chain.from_iterable(pool.unbind() for pool in self._pages.values()))


def _allocate(parts: Iterable[tuple[Part, ...]], sizes: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """One pool for each part name, [layers that have it, *sizes, ...]."""
    num_layers = Counter(chain.from_iterable(parts))
    pools = {
        part.name: torch.empty(count, *sizes, *part.shape, dtype=part.dtype, device=device)
        for part, count in num_layers.items()
    }
    assert len(pools) == len(num_layers), f"parts of one name, but not of one shape: {list(num_layers)}"
    return pools
