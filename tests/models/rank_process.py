"""One rank of a model on the CPU: `python -m tests.models.rank_process RANK RANKS DIRECTORY…` writes `rank-RANK.pt` to
each checkpoint directory.

The ranks find each other through a file in the first directory, and communicate with gloo over the loopback
interface.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from agentspec.kernels import GatheredGroup, Group
from agentspec.models.hf_config import TextConfig, load_text_config
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import model_spec
from agentspec.models.shards import SINGLE_RANK, Rank
from agentspec.models.weights import Checkpoint
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
PROMPT, WINDOW = list(range(3, 73)), [5, 90, 17, 4]


def rank_config(config: TextConfig, rank: Rank) -> TextConfig:
    """The config with the number of heads that a rank holds. With fewer key/value heads than ranks, each rank holds
    one."""
    return replace(
        config,
        num_heads=config.num_heads // rank.count,
        num_kv_heads=max(config.num_kv_heads // rank.count, 1),
        num_key_heads=config.num_key_heads // rank.count,
        num_value_heads=config.num_value_heads // rank.count,
    )


def outputs(directory: Path, rank: Rank = SINGLE_RANK, group: Group | None = None) -> dict[str, Tensor]:
    """A rank's outputs for a prompt, a window and its drafts, by name."""
    config = load_text_config(directory).with_mtp_layers(1)
    spec = model_spec(directory, config, torch.float32)
    with Checkpoint(directory) as checkpoint:
        parameters = checkpoint.load(config, device=CPU, dtype=torch.float32, rank=rank)
    driver = Driver(Qwen3_5Model(rank_config(config, rank), spec, parameters, group=group))
    prompt_NH = driver.prefill(PROMPT, (33,))
    driver.mtp_prefill(PROMPT, prompt_NH)
    window_NH = driver.verify([WINDOW], [len(WINDOW)])[0]
    m_NH = driver.mtp(WINDOW, torch.cat([prompt_NH[-1:], window_NH[:-1]]), len(PROMPT))
    model = driver.model
    return {
        "prompt": prompt_NH,
        "window": window_NH,
        "scores": model.logits(window_NH),
        "mtp": m_NH,
        "drafts": model.draft_head(m_NH),
    }


def main(index: int, count: int, directories: list[Path]) -> None:
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
