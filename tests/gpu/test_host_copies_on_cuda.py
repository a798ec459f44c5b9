"""The host tier's copies on a GPU: in parallel with steps, in order, and without blocking the host."""

from __future__ import annotations

import random
import time

import pytest
import torch

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.runtime.host_copies import CopyProgress, HostCopies
from tests.fakes.hash_chain import HashChainModel

pytestmark = pytest.mark.gpu
ROWS, PAGES = 40, 400


def finish(copies: HostCopies, *progress: int) -> None:
    began = time.monotonic()
    while copies.poll() != CopyProgress(*progress):
        assert time.monotonic() - began < 60, "the copies do not complete within 60 s"


def new_model(cuda: torch.device) -> HashChainModel:
    model = HashChainModel(device=cuda)
    model.allocate(num_rows=ROWS, num_pages=PAGES)
    return model


def test_states_round_trip_through_host(cuda: torch.device) -> None:
    model, rng = new_model(cuda), random.Random(0)
    tensors = (*model.row_tensors(), *model.page_tensors())
    for tensor in tensors:
        tensor.copy_(torch.randint_like(tensor, 1 << 60))
    expected = [tensor.cpu() for tensor in tensors]
    copies = HostCopies(model, HostMemory(num_rows=ROWS, num_pages=PAGES), cuda)
    rows, pages = rng.sample(range(ROWS), ROWS), rng.sample(range(PAGES), PAGES)
    order = CopyOrder(1, list(enumerate(rows)), list(enumerate(pages)))
    copies.launch(CopyOrders(to_host=[order]))
    finish(copies, 1, 0)
    for tensor in tensors:
        tensor.zero_()
    copies.launch(
        CopyOrders(
            to_device=[
                CopyOrder(
                    1, [(there, here) for here, there in order.rows], [(there, here) for here, there in order.pages]
                )
            ]
        )
    )
    finish(copies, 1, 1)
    for tensor, before in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.cpu(), before)
    copies.close()


def test_copies_wait_for_earlier_steps_and_do_not_block_host(cuda: torch.device) -> None:
    model = new_model(cuda)
    copies = HostCopies(model, HostMemory(num_rows=ROWS, num_pages=PAGES), cuda)
    row = model.row_tensors()[0]
    busy = torch.rand(8192, 8192, device=cuda)
    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy * 1e-4
    row[5] = 77
    copies.launch(CopyOrders(to_host=[CopyOrder(1, [(5, 5)], [])]))
    assert copies.poll().to_host == 0, "the copy completed before it could start, or the host waited for it"
    finish(copies, 1, 0)
    copies.launch(CopyOrders(to_device=[CopyOrder(1, [(5, 6)], [])]))
    finish(copies, 1, 1)
    assert (row[6] == 77).all()
    copies.close()


def test_host_memory_is_freed_and_can_be_pinned_again(cuda: torch.device) -> None:
    model = new_model(cuda)
    for _ in range(3):
        copies = HostCopies(model, HostMemory(num_rows=ROWS, num_pages=PAGES), cuda)
        copies.close()
        del copies
