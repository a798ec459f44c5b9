"""The exchange kernels between processes on a CPU, in Triton's interpreter, over buffers in shared files
(exchange_rank.py). The interpreter runs the programs of a kernel one after the other, so a program that waits for
another program's flag would hang. It has no weak memory: `test_exchange_ptx.py` looks at what is compiled."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from agentspec.errors import ConfigError
from agentspec.kernels import Group, shared_device_memory
from agentspec.kernels.peer_memory import ALIGNMENT, FLAG_LINE, Channel, ExchangeLayout, PeerMemory, create_files
from agentspec.kernels.shared_device_memory import DriverError
from agentspec.kernels.triton.exchange import ExchangeGroup
from agentspec.kernels.triton.launch import INTERPRETED
from tests.fakes import mapped_device
from tests.fakes.forks import FORKS
from tests.kernels.triton import exchange_rank
from tests.kernels.triton.exchange_rank import small_layout

PATIENCE = 100
"""Seconds until a hang is a failure."""

interpreted_only = pytest.mark.skipif(
    not INTERPRETED,
    reason="ranks on a CPU need Triton's interpreter; tests/gpu/test_exchange_on_cuda.py tests ranks on a CUDA device",
)


@contextmanager
def rank_processes(
    scene: str, ranks: int, directory: Path, *, count: int, only: int | None = None
) -> Iterator[list[ForkServerProcess]]:
    seed = random.randrange(2**31)
    print(f"{seed=}")
    create_files(small_layout(ranks), directory)
    processes = [
        FORKS.Process(target=exchange_rank.main, args=(scene, rank, ranks, seed, count, directory))
        for rank in range(ranks)
        if only in (None, rank)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ended(process: ForkServerProcess) -> int | None:
    """Wait for a process; returns its exit code."""
    process.join(PATIENCE)
    return process.exitcode


@interpreted_only
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_equal_the_reference_on_every_rank(ranks: int, tmp_path: Path) -> None:
    with rank_processes("mixed", ranks, tmp_path, count=16 if ranks == 2 else 6) as processes:
        assert [ended(process) for process in processes] == [0] * ranks


@interpreted_only
@pytest.mark.parametrize("ranks", [3])
def test_abort_word_frees_the_peers_of_a_killed_rank(ranks: int, tmp_path: Path) -> None:
    with rank_processes("abort", ranks, tmp_path, count=5) as processes:
        assert ended(processes[-1]) == -signal.SIGKILL
        assert all(process.exitcode is None for process in processes[:-1])
        PeerMemory.of_files(0, small_layout(ranks), tmp_path).abort.fill_(1)
        assert [ended(process) for process in processes[:-1]] == [0] * (ranks - 1)


@interpreted_only
@pytest.mark.parametrize("ranks", [2, 3])
def test_tags_that_come_again_are_no_old_ones(ranks: int, tmp_path: Path) -> None:
    with rank_processes("tags_come_again", ranks, tmp_path, count=0) as processes:
        assert [ended(process) for process in processes] == [0] * ranks


@interpreted_only
def test_freed_rank_never_sets_a_flag_again(tmp_path: Path) -> None:
    with rank_processes("freed_rank_sets_no_flags", 3, tmp_path, count=0, only=1) as (process,):
        assert ended(process) == 0


def test_processes_map_each_others_memory(tmp_path: Path) -> None:
    """With files instead of the driver's memory."""
    processes = [FORKS.Process(target=mapped_device.main, args=(rank, 3, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        assert [ended(process) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_memory_that_cannot_be_mapped_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    with pytest.raises(DriverError, match=r"the driver's library: .*libcuda\.so\.1"):
        shared_device_memory.map_exported(bytes(shared_device_memory.HANDLE_BYTES))


def spans(channel: Channel) -> list[tuple[int, int]]:
    """Begin and end of everything that a channel keeps."""
    regions = channel.phases * 2 * channel.ranks * channel.programs
    return [
        (channel.begin, channel.begin + 8 * channel.programs),
        (channel.flags, channel.flags + channel.phases * channel.programs * FLAG_LINE),
        *((begin := channel.slots + index * channel.region, begin + channel.region) for index in range(regions)),
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_nothing_in_a_buffer_overlaps(ranks: int) -> None:
    for layout in (ExchangeLayout(ranks=ranks), small_layout(ranks)):
        channels = (layout.one_shot, layout.two_shot, layout.gather, layout.winners)
        found = sorted([(0, 8), *(span for channel in channels for span in spans(channel))])
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
        assert found[-1][1] <= layout.num_bytes
        assert all(value % ALIGNMENT == 0 for channel in channels for value in (channel.slots, channel.region))
        for width in (1, min(layout.one_shot_limit // 7, layout.widest), layout.widest):
            rows = layout.one_shot_limit // width
            rows_a_program = -(-rows // layout.one_shot.programs)
            assert layout.one_shot.region >= 2 * 4 * rows_a_program * width, "two planes of words with half their bytes"
        assert layout.num_bytes < 2**27, "constants of the kernels are 32-bit"


def test_impossible_groups_are_refused() -> None:
    for ranks in (1, 17):
        with pytest.raises(ConfigError, match="ranks"):
            ExchangeLayout(ranks=ranks)
    two, three = ExchangeLayout(ranks=2), ExchangeLayout(ranks=3)
    with pytest.raises(ValueError, match="ranks"):
        ExchangeGroup(PeerMemory.of_one_process(two, torch.device("cpu"))[0], three)


def test_ranks_of_one_process_know_each_other() -> None:
    layout = small_layout(3)
    views = PeerMemory.of_one_process(layout, torch.device("cpu"))
    assert [view.rank for view in views] == [0, 1, 2]
    for view in views:
        assert view.table_R.tolist() == [*(peer.buffer.data_ptr() for peer in views), views[0].abort.data_ptr()]
        assert view.buffer.shape == (layout.num_bytes,)
        assert not view.buffer.any()
    groups: list[Group] = [ExchangeGroup(view, layout) for view in views]
    assert [group.size for group in groups] == [3, 3, 3]
