"""The whole decode step on these kernels: a small model's streams are those of the reference backend, greedy and sampled."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from agentspec import kernels
from agentspec.kernels import triton as triton_backend
from tests.properties.real_model import House, Play, alone, write_agreeing_checkpoint


@pytest.mark.parametrize("sampled", [False, True])
def test_streams_are_those_of_the_reference(sampled: bool, device: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, num_hidden_layers=2, full_attention_interval=2)
    house = House(seed=11, max_draft_tokens=2, random_depth=True, prefill_budget=99)
    with patch.object(kernels, "backend", lambda _: triton_backend):
        play = Play(house, checkpoint, num_agents=2, sampled=sampled, device=device)
        play.run()
    reference = alone(checkpoint)
    for turn in play.turns:
        assert turn.emitted == reference.generate(turn.submit)[0], f"{house}: {turn.submit}"
