"""KV pages: which are free. Page SCRATCH_PAGE belongs to nobody.

Knows nothing about what a page holds, nor about the tree.
"""

from __future__ import annotations

from agentspec.cache.id_pool import IdPool
from agentspec.types import SCRATCH_PAGE


class PagePool(IdPool):
    """`num_pages` counts all pages of the KV tensors, the scratch page included."""

    noun = "page"

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, num_reserved=SCRATCH_PAGE + 1)
