"""How bytes become rows and pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentspec.errors import ConfigError
from agentspec.runtime.memory_plan import choose_slots, longest_sequence, plan_host_memory, plan_memory
from agentspec.types import ModelSpec, rows_of_request

SPEC = ModelSpec(
    name="m",
    vocab_size=100,
    num_real_tokens=100,
    max_context=4096,
    hidden_size=64,
    has_mtp=True,
    stop_token_ids=(),
    row_bytes=1_000_000,
    page_bytes=50_000,
)


@pytest.mark.parametrize("memory_bytes", [50_000_000, 200_000_000, 10**9, 10**11])
@pytest.mark.parametrize("max_running", [1, 4])
@pytest.mark.parametrize("max_draft_tokens", [0, 3, 7])
def test_plan_stays_inside_its_budget(memory_bytes: int, max_running: int, max_draft_tokens: int) -> None:
    plan = plan_memory(SPEC, memory_bytes=memory_bytes, max_running=max_running, max_draft_tokens=max_draft_tokens)
    assert plan.num_rows * SPEC.row_bytes + plan.num_pages * SPEC.page_bytes <= memory_bytes
    assert plan.num_rows >= 2 + max_running * (max_draft_tokens + 3)
    assert 0 < plan.max_length <= SPEC.max_context


@pytest.mark.parametrize(("fp8_pages", "tokens"), [(False, 8192), (True, 16_384)])
@pytest.mark.parametrize("row_bytes", [200_000, 1_000_000, 5_000_000])
def test_each_checkpoint_row_gets_its_tokens(row_bytes: int, fp8_pages: bool, tokens: int) -> None:
    spec = replace(SPEC, row_bytes=row_bytes, max_context=2**18, fp8_pages=fp8_pages)
    plan = plan_memory(spec, memory_bytes=600_000_000, max_running=2, max_draft_tokens=3)
    checkpoint_rows = plan.num_rows - 2 - 2 * 6 - 2
    assert plan.num_pages * 64 // tokens <= checkpoint_rows <= plan.num_pages * 64 // tokens + 1


def test_longest_sequence_fits_with_its_last_windows() -> None:
    for num_pages in (3, 10, 65):
        for drafts in (0, 3, 7):
            length = longest_sequence(num_pages, drafts, 64)
            assert -(-(length + 2 * (drafts + 1)) // 64) <= num_pages - 1


def test_too_little_memory_error_names_the_needed_amount() -> None:
    with pytest.raises(ConfigError, match=r"memory='0\.009313 GiB'.*need at least 0\.0"):
        plan_memory(SPEC, memory_bytes=10_000_000, max_running=4, max_draft_tokens=3)


@pytest.mark.parametrize("host_bytes", [10_000_000, 10**9, 10**12])
def test_host_memory_stays_inside_its_budget(host_bytes: int) -> None:
    host = plan_host_memory(SPEC, host_bytes)
    assert host is not None
    assert 0.8 * host_bytes < host.num_rows * SPEC.row_bytes + host.num_pages * SPEC.page_bytes <= host_bytes


@pytest.mark.parametrize("host_bytes", [0, 10_000, 1_000_000, 1_300_000])
def test_host_memory_too_small_for_a_path_is_none(host_bytes: int) -> None:
    assert plan_host_memory(SPEC, host_bytes) is None


@pytest.mark.parametrize(
    ("row_mb", "gigabytes", "slots"),
    [
        (51.5, 61.3, 64),
        (51.5, 30.0, 32),
        (154.0, 46.0, 16),
        (154.0, 24.0, 8),
        (154.0, 18.0, 8),
        (154.0, 15.0, 8),
        (154.0, 14.0, 4),
        (154.0, 3.0, 1),
        (154.0, 0.0, 1),
        (0.1, 60.0, 64),
    ],
)
def test_chosen_slots_use_at_most_a_third_of_the_memory_or_half_if_they_are_few(
    row_mb: float, gigabytes: float, slots: int
) -> None:
    """A 4B and a 27B model, on devices of several sizes."""
    spec = replace(SPEC, row_bytes=int(row_mb * 1e6))
    assert choose_slots(spec, lambda _: int(gigabytes * 1e9), max_draft_tokens=3, usual=8) == slots
    own_bytes = slots * rows_of_request(3, has_ring=False) * spec.row_bytes
    assert slots == 1 or own_bytes <= gigabytes * 1e9 / (3 if slots > 8 else 2)
