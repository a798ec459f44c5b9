"""Counts tensor operations that reach a model's pools outside the kernels: the proof that no state is copied.

    with CopyCounter(model.pools.tensors()) as counter:
        ...
    assert counter.touched == []

Views only move pointers and are not counted; anything that loads from or stores to a pool's memory outside a function
marked `agentspec.kernels.traffic.touches_pools` is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentspec.kernels.traffic import state_traffic


class CopyCounter(TorchDispatchMode):
    def __init__(self, pools: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {pool.untyped_storage().data_ptr() for pool in pools}
        self.touched: list[str] = []
        """Names of the offending operations, in order."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Keeping the compiler out of every operation would take longer than counting it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            state_traffic.kernel_depth == 0
            and not _is_view(func)
            and any(map(self._in_pool, tree_leaves((args, kwargs))))
        ):
            self.touched.append(str(func))
        return func(*args, **kwargs)

    def _in_pool(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._storages


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
