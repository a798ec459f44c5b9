"""What a model remembers between calls: the form of each layer's state, and the pools that are built from these forms.

Which row or page belongs to whom is the cache's business; here ids are only pointers.

Shape letters: L layers that keep a part, R rows, P pages, H hidden size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from agentspec.types import ZERO_ROW

Memory = tuple[Tensor, ...]
"""One layer's state: the tensors of its row parts, [R, ...], then those of its page parts, [P, ...], in the order of
its form."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a layer keeps for every row, or for every page."""

    name: str
    """Of the pool that holds it for all layers, [layers that keep it, rows or pages, *shape]. Parts of one name are of
    one shape and dtype."""
    shape: tuple[int, ...]
    """Of one row or page in one layer."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StateForm:
    """What a layer keeps between calls.

    Rows are kept one for each window column:

    - A request owns the rows that `types.rows_of_request` counts. A slot takes no bytes beside them.
    - A window reads the slot's read row and writes the whole state after column t to its t-th write row.
    - A commit moves the read row to the write row of the last accepted column. No state is copied, and what rejected
      columns wrote is overwritten. There is nothing to fold.

    Pages hold something of each token at its position, and a window writes those of its columns. Rejected positions are
    written again before they are read. Only the model knows which layer has which parts: cache and scheduler deal in
    ids and lengths.
    """

    row_parts: tuple[Part, ...] = ()
    page_parts: tuple[Part, ...] = ()


def hidden_form(hidden_size: int, dtype: torch.dtype) -> StateForm:
    """Of the model itself: the last token's hidden after the final norm."""
    return StateForm(row_parts=(Part("hidden_LRH", (hidden_size,), dtype),))


def row_bytes(forms: Iterable[StateForm]) -> int:
    """Bytes of one state row over all layers."""
    return sum(part.nbytes for form in forms for part in form.row_parts)


def page_bytes(forms: Iterable[StateForm]) -> int:
    """Bytes of one page over all layers."""
    return sum(part.nbytes for form in forms for part in form.page_parts)


class StatePools:
    """The state of every layer, for all rows and pages. `pools["ssm_LRVDK"]` is one part over the layers that keep it,
    in their order."""

    def __init__(self, forms: Sequence[StateForm], *, num_rows: int, num_pages: int, device: torch.device) -> None:
        """forms: of every layer, in order, `hidden_form` the last. ZERO_ROW is zeroed, the rest holds whatever memory
        held."""
        self._rows = _allocate((form.row_parts for form in forms), num_rows, device)
        self._pages = _allocate((form.page_parts for form in forms), num_pages, device)
        for pool in self._rows.values():
            pool[:, ZERO_ROW] = 0
        layers = {name: iter(pool) for name, pool in (self._rows | self._pages).items()}
        memories = [tuple(next(layers[part.name]) for part in (*form.row_parts, *form.page_parts)) for form in forms]
        *self.layers, (self.hidden_RH,) = memories

    def __getitem__(self, name: str) -> Tensor:
        return self._rows[name] if name in self._rows else self._pages[name]

    def tensors(self) -> tuple[Tensor, ...]:
        return *self._rows.values(), *self._pages.values()

    def row_tensors(self) -> tuple[Tensor, ...]:
        """Layer by layer, so that element r of each tensor is contiguous: a part of row r."""
        return tuple(chain.from_iterable(pool.unbind() for pool in self._rows.values()))

    def page_tensors(self) -> tuple[Tensor, ...]:
        """The same for pages; neighbouring ones are neighbours in memory."""
        return tuple(chain.from_iterable(pool.unbind() for pool in self._pages.values()))


def _allocate(parts: Iterable[tuple[Part, ...]], num_ids: int, device: torch.device) -> dict[str, Tensor]:
    """A pool for each part, by name, [layers that keep it, num_ids, ...]."""
    num_layers = Counter(chain.from_iterable(parts))
    pools = {
        part.name: torch.empty(count, num_ids, *part.shape, dtype=part.dtype, device=device)
        for part, count in num_layers.items()
    }
    assert len(pools) == len(num_layers), f"parts of one name, but not of one shape: {list(num_layers)}"
    return pools
