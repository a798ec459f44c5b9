"""Copy orders carried out on real pools: rows and pages arrive complete, in order, a bounded number of copies at a
time."""

from __future__ import annotations

import random

import pytest
import torch

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.models.state import StatePools
from agentspec.runtime import host_copies
from agentspec.runtime.host_copies import HostCopies
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.hash_chain import HashChainModel
from tests.fakes.loaded import load_model

CPU = torch.device("cpu")
ROWS, PAGES = 12, 40


def new_model() -> HashChainModel:
    model = HashChainModel()
    model.allocate(num_rows=ROWS, num_pages=PAGES)
    for tensor in (*model.row_tensors(), *model.page_tensors()):
        tensor.copy_(torch.randint_like(tensor, 1 << 60))
    return model


def finish(copies: HostCopies, to_host: int, to_device: int) -> int:
    """Poll until the orders are complete; returns the number of polls."""
    for count in range(1000):
        progress = copies.poll()
        assert progress.to_host <= to_host
        assert progress.to_device <= to_device
        if progress == (to_host, to_device):
            return count
    raise AssertionError("the copies never end")


def test_state_returns_unchanged_to_other_ids() -> None:
    rng = random.Random(3)
    model = new_model()
    rows, pages = model.row_tensors(), model.page_tensors()
    before_rows, before_pages = [tensor.clone() for tensor in rows], [tensor.clone() for tensor in pages]
    copies = HostCopies(model, HostMemory(num_rows=5, num_pages=30), CPU)
    source, on_host, target = rng.sample(range(PAGES), 20), rng.sample(range(30), 20), rng.sample(range(PAGES), 20)
    copies.launch(CopyOrders(to_host=[CopyOrder(1, [(3, 4)], list(zip(source, on_host, strict=True)))]))
    finish(copies, 1, 0)
    for tensor in (*rows, *pages):
        tensor.fill_(-1)
    copies.launch(CopyOrders(to_device=[CopyOrder(1, [(4, 9)], list(zip(on_host, target, strict=True)))]))
    finish(copies, 1, 1)
    for tensor, before in zip(rows, before_rows, strict=True):
        assert torch.equal(tensor[9], before[3])
        assert (tensor[torch.arange(ROWS) != 9] == -1).all(), "nothing but the row is written"
    for tensor, before in zip(pages, before_pages, strict=True):
        assert torch.equal(tensor[target], before[source])
        rest = torch.ones(PAGES, dtype=torch.bool)
        rest[target] = False
        assert (tensor[rest] == -1).all(), "nothing but the pages is written"


def test_all_rows_and_pages_of_a_real_model_are_copied(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_model(write_checkpoint(tmp_path_factory.mktemp("model"), "dense"), device=CPU, dtype=torch.bfloat16)
    model.allocate(num_rows=4, num_pages=6)
    pools: StatePools = model.pools
    assert sum(tensor[0].nbytes for tensor in model.row_tensors()) == model.spec.row_bytes
    assert sum(tensor[0].nbytes for tensor in model.page_tensors()) == model.spec.page_bytes
    assert all(tensor[0].is_contiguous() for tensor in (*model.row_tensors(), *model.page_tensors()))
    for tensor in pools.tensors():
        tensor.copy_(torch.rand(tensor.shape))
    expected = [tensor.clone() for tensor in pools.tensors()]
    copies = HostCopies(model, HostMemory(num_rows=2, num_pages=3), CPU)
    copies.launch(CopyOrders(to_host=[CopyOrder(1, [(2, 0), (3, 1)], [(2, 0), (3, 1), (5, 2)])]))
    finish(copies, 1, 0)
    copies.launch(CopyOrders(to_device=[CopyOrder(1, [(1, 2), (0, 3)], [(2, 2), (1, 3), (0, 5)])]))
    finish(copies, 1, 1)
    for tensor, before in zip(pools.tensors(), expected, strict=True):
        if tensor is pools["kv_AP2SGD"]:
            assert torch.equal(tensor[:, [2, 3, 5]], before[:, [5, 3, 2]])
        else:
            ids = (slice(None), [2, 3]) if tensor.ndim > 2 else ([2, 3],)
            other = (slice(None), [3, 2]) if tensor.ndim > 2 else ([3, 2],)
            assert torch.equal(tensor[ids], before[other])


def test_neighbouring_pages_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "COPIES_AT_ONCE", 1)
    copies = HostCopies(new_model(), HostMemory(num_rows=5, num_pages=30), CPU)
    pages = [*((i, i + 3) for i in range(10, 20)), (25, 26), (26, 28)]
    copies.launch(CopyOrders(to_host=[CopyOrder(1, [], pages)]))
    assert finish(copies, 1, 0) in (5, 6), "three runs in each of two tensors, one of which went at the launch"


def test_each_call_enqueues_a_bounded_number_and_orders_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "COPIES_AT_ONCE", 3)
    model = new_model()
    copies = HostCopies(model, HostMemory(num_rows=5, num_pages=30), CPU)
    odd = [(i, i) for i in range(1, 30, 2)]
    copies.launch(CopyOrders(to_host=[CopyOrder(1, [(2, 2)], odd), CopyOrder(2, [(3, 2)], [])]))
    seen = [copies.poll().to_host for _ in range(14)]
    assert seen[0] == 0
    assert seen[-1] == 2
    assert seen == sorted(seen)
    row = model.row_tensors()[0][3].clone()
    copies.launch(CopyOrders(to_device=[CopyOrder(1, [(2, 7)], [])]))
    finish(copies, 2, 1)
    assert torch.equal(model.row_tensors()[0][7], row), "the later of two orders into the same row stands"


def test_copies_to_the_host_wait_for_those_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "COPIES_AT_ONCE", 1)
    model = new_model()
    row = model.row_tensors()[0]
    copies = HostCopies(model, HostMemory(num_rows=2, num_pages=30), CPU)
    copies.launch(CopyOrders(to_host=[CopyOrder(1, [(2, 0)], [])]))
    finish(copies, 1, 0)
    held = row[2].clone()
    copies.launch(
        CopyOrders(
            to_host=[CopyOrder(2, [(3, 0)], [])], to_device=[CopyOrder(1, [(0, 5)], [(i, i) for i in range(1, 20, 2)])]
        )
    )
    finish(copies, 2, 1)
    assert torch.equal(row[5], held), "host row 0 had a new owner, but not before it was read"
