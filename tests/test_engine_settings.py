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


def resolved(
    device: torch.device, spec: ModelSpec = SPEC, *, free: int = 2**40, max_running: Any = 2, **settings: Any
) -> Settings:
    return Settings.resolve(EngineConfig(max_running=max_running, **settings), spec, device, free=free)


def test_slots_have_rings_where_they_are_faster() -> None:
    assert resolved(CUDA, copy_drafts=0).ring == RingShape.of(4)
    assert resolved(CUDA).ring == RingShape.of(16)
    assert resolved(CPU).ring is None
    assert resolved(CPU, state_form="ring").has_ring
    assert not resolved(CUDA, state_form="rows").has_ring


def test_a_model_whose_layers_store_whole_states_has_rows() -> None:
    spec = replace(SPEC, entry_bytes=0)
    assert not resolved(CUDA, spec).has_ring
    with pytest.raises(ConfigError, match="state_form='ring': toy has layers that store whole states only"):
        resolved(CUDA, spec, state_form="ring")


def test_dense_models_with_rings_draft_copies() -> None:
    assert resolved(CUDA).max_copies == 12
    assert resolved(CUDA, draft_tokens=5).max_copies == 10
    assert resolved(CPU, state_form="ring").max_copies == 12
    assert resolved(CUDA, copy_drafts=0).max_copies == 0
    assert resolved(CUDA, state_form="rows").max_copies == resolved(CPU).max_copies == 0
    experts = replace(SPEC, has_experts=True)
    assert resolved(CUDA, experts).max_copies == 0
    assert resolved(CUDA, experts, copy_drafts=9).max_copies == 9


def test_copies_that_nobody_asked_for_take_little_memory_and_no_slots() -> None:
    for num_slots in (2, "auto"):
        by_memory = [(resolved(CUDA, free=mib * 2**20, max_running=num_slots), mib) for mib in range(200, 4000, 20)]
        without = [mib for settings, mib in by_memory if not settings.max_copies]
        assert without == list(range(200, max(without) + 20, 20)), "with more memory there are copies"
        for settings, mib in by_memory:
            plain = resolved(CUDA, free=mib * 2**20, max_running=num_slots, copy_drafts=0)
            assert settings.max_running == plain.max_running
            assert settings.memory_bytes(mib * 2**20) >= 7 / 8 * plain.memory_bytes(mib * 2**20)
        asked_for = resolved(CUDA, free=max(without) * 2**20, max_running=num_slots, copy_drafts=12)
        assert asked_for.max_copies == 12


def test_a_context_that_was_asked_for_counts_more_than_copies() -> None:
    spec = replace(SPEC, entry_bytes=2**20, page_bytes=2**21, max_context=65_536)
    free = 2**31
    contexts = range(64, spec.max_context, 64)
    plain = resolved(CUDA, spec, free=free, copy_drafts=0)
    longest = max(n for n in contexts if _has_plan(resolved(CUDA, spec, free=free, copy_drafts=0, max_context=n), free))
    assert resolved(CUDA, spec, free=free).max_copies == 12 > plain.max_copies
    settings = resolved(CUDA, spec, free=free, max_context=longest)
    assert settings.max_copies == 0
    assert _has_plan(settings, free)


def _has_plan(settings: Settings, free: int) -> bool:
    try:
        settings.plan_memory(None, free)
    except ConfigError:
        return False
    return True


def test_copies_that_a_window_has_no_room_for_are_refused() -> None:
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
