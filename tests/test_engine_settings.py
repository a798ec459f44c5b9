"""What an engine's `auto` settings become, by model and device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from agentspec import EngineConfig
from agentspec.engine.settings import Settings, refuse_weights
from agentspec.errors import ConfigError
from agentspec.types import ModelSpec, RingShape, rows_of_request

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = ModelSpec(
    name="toy",
    vocab_size=512,
    num_real_tokens=500,
    max_context=4096,
    hidden_size=64,
    has_mtp=True,
    stop_token_ids=(1,),
    row_bytes=4096,
    page_bytes=4096,
    entry_bytes=64,
)


def resolved(device: torch.device, spec: ModelSpec = SPEC, **settings: Any) -> Settings:
    return Settings.resolve(EngineConfig(max_running=2, **settings), spec, device)


def test_slots_have_rings_where_they_are_faster() -> None:
    assert resolved(CUDA).ring == RingShape.of(4)
    assert resolved(CPU).ring is None
    assert resolved(CPU, state_form="ring").has_ring
    assert not resolved(CUDA, state_form="rows").has_ring


def test_a_model_whose_layers_store_whole_states_has_rows() -> None:
    spec = replace(SPEC, entry_bytes=0)
    assert not resolved(CUDA, spec).has_ring
    with pytest.raises(ConfigError, match="state_form='ring': toy has layers that store whole states only"):
        resolved(CUDA, spec, state_form="ring")


def test_copies_are_drafted_where_they_or_rings_were_asked_for() -> None:
    assert resolved(CUDA).max_copies == 0
    assert resolved(CUDA, copy_drafts=9).max_copies == 9
    assert resolved(CPU, state_form="ring").max_copies == 12
    with pytest.raises(ConfigError, match=r"copy_drafts=9: with 3 MTP drafts there is room for 4; slots with rings"):
        resolved(CPU, copy_drafts=9)


def test_wide_windows_need_rings() -> None:
    assert resolved(CUDA, draft_tokens=15).max_drafts == 15
    assert rows_of_request(15, has_ring=True) == 3
    with pytest.raises(ConfigError, match=r"draft_tokens=9: there is room for 7; slots with rings have more"):
        resolved(CPU, draft_tokens=9)


def test_weights_that_the_device_cannot_hold_are_refused_with_what_is_missing() -> None:
    refuse_weights("27B", 2**30, 2**30)

    with pytest.raises(
        ConfigError, match=r"model='27B': its weights take 50\.9 GiB and the device has 23\.5 GiB free: "
    ) as e:
        refuse_weights("27B", int(50.9 * 2**30), int(23.5 * 2**30))
    assert "27.4 GiB are missing" in str(e.value)
