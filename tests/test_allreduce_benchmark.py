"""`python -m benchmarks.allreduce`: its floor, its table, and what it says without enough GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.allreduce import Cell, floor_bytes, main, table


def test_a_rank_sends_least_in_two_shots() -> None:
    assert floor_bytes(1000, 2) == 1000  # the same either way
    assert floor_bytes(1000, 4) == 1500
    assert floor_bytes(1000, 8) == 1750


def test_the_table_shows_what_was_not_measured() -> None:
    cell = Cell(ranks=2, tokens=4, hidden=2560, partials="bfloat16", floor_us=2.04, times_us={"nccl": 17.06})
    assert table([cell]).splitlines()[-1] == "| 2 | 4 x 2560 | bfloat16 | 2.0 | - | - | - | 17.1 | - | - |"


def test_too_few_devices_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "1")
    main(["--ranks", "2", "4", "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        "skipped: 2 ranks need 2 CUDA devices, torch sees 1",
        "skipped: 4 ranks need 4 CUDA devices, torch sees 1",
    ]
    assert not list(tmp_path.iterdir())
