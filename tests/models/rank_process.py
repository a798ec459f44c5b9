"""One rank of models on the CPU: `main`, in a process of its own, writes `rank-RANK.pt` to each checkpoint directory.

The ranks find each other through a file in the first directory, and communicate with gloo over the loopback
interface.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from agentspec import kernels
from agentspec.kernels import GatheredGroup, Group
from agentspec.models import tensors
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import load_model
from agentspec.models.shards import SINGLE_RANK, Rank
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
PROMPT, WINDOW = list(range(3, 73)), [5, 90, 17, 4]
FP8_DRAFTS = "fp8-drafts"
"""A file of this name in the directory asks for 8-bit drafts."""
KEPT_HEAD = "kept-head"
"""A file of this name asks for a quantised head that stays as it is, as on a GPU."""


def outputs(directory: Path, rank: Rank = SINGLE_RANK, group: Group | None = None) -> dict[str, Tensor]:
    """A rank's outputs for a prompt, a window and its drafts, by name."""
    fp8_drafts = (directory / FP8_DRAFTS).exists()
    with pytest.MonkeyPatch.context() as patch:
        if (directory / KEPT_HEAD).exists():
            patch.setattr(tensors, "holds_head", lambda scheme, shape, device: True)
        model = load_model(directory, device=CPU, dtype=torch.float32, fp8_drafts=fp8_drafts, rank=rank, group=group)
    assert isinstance(model, Qwen3_5Model)
    driver = Driver(model)
    prompt_NH = driver.prefill(PROMPT, (33,))
    driver.mtp_prefill(PROMPT, prompt_NH)
    window_NH = driver.verify([WINDOW], [len(WINDOW)])[0]
    m_NH = driver.mtp(WINDOW, torch.cat([prompt_NH[-1:], window_NH[:-1]]), len(PROMPT))
    found = {
        "prompt": prompt_NH,
        "window": window_NH,
        "scores": model.logits(window_NH),
        "mtp": m_NH,
        "drafts": model.draft_head(m_NH),
    }
    wide_NH = torch.randn(300, m_NH.shape[1], generator=torch.Generator().manual_seed(0))
    for name, ids in limits(model.spec.num_real_tokens).items():
        if fp8_drafts and len(ids) <= kernels.SCALE_BLOCK:
            continue  # too few for a block a rank: rows that shared a multiplier no longer do
        model.limit_drafts(ids)
        found[f"drafts, {name}"] = torch.stack([model.draft_head(x) for x in (m_NH, wide_NH[:4])])
        found[f"drafts of many, {name}"] = model.draft_head(wide_NH)
    return found


def limits(num_real: int) -> dict[str, range]:
    """Draft vocabularies by name: spread, in one rank's part of the head, of fewer tokens than ranks, and all."""
    return {
        "even ids": range(0, num_real, 2),
        "low ids": range(num_real // 3),
        "a token": range(7, 8),
        "three tokens": range(40, 43),
        "all": range(num_real),
    }


def main(index: int, count: int, directories: list[Path]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(  # type: ignore[attr-defined]
        str(directories[0] / "meeting"), count
    )
    distributed.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=timedelta(seconds=60))
    process_group = distributed.group.WORLD
    assert process_group is not None
    with torch.inference_mode():
        for directory in directories:
            torch.save(
                outputs(directory, Rank(index, count), GatheredGroup(process_group)), directory / f"rank-{index}.pt"
            )
    distributed.destroy_process_group()
