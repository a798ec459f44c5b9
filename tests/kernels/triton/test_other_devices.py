"""Launches and plans off Hopper. No kernel runs here: compile_kernels.py compiles them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentspec.kernels.triton import (
    attention,
    chunked_delta,
    expert_prefill,
    fp8_prefill,
    launch,
    linear_plans,
    machine,
    prefill_attention,
)
from agentspec.kernels.variants import Machine
from agentspec.kernels.weights import BlockScaled
from tests.kernels.triton.test_exchange_ptx import compiling_environment

A100, L40S, H100, RTX_5090 = (8, 0), (8, 9), (9, 0), (12, 0)
KB = 1024

EVERY_KERNEL = """
from tests.kernels.triton.compile_case import ELSEWHERE, HOPPER
from tests.kernels.triton.compile_kernels import all_cases, chosen

ON_ONE_TARGET = ("_hopper", ".exchange", ".exchange_one_shot")
cases = [case for case in all_cases() if not case.kernel.__module__.endswith(ON_ONE_TARGET)]
for target in ELSEWHERE:
    missing = {c.kernel.__name__ for c in cases} - {c.kernel.__name__ for c in cases if target in c.targets}
    in_fp8 = {
        "_gated_norm_to_fp8",
        "_quantize_kernel",
        "_sum_norm_kernel",
        "add_norm_kernel",
        "gate_tokens_kernel",
        "norm_tokens_kernel",
    }
    assert missing == (in_fp8 if target == 80 else set()), (target, missing)
found = chosen((HOPPER, *ELSEWHERE), (), every_case=False)
assert len(found) == len(set(found)), "two cases have one name and target"
assert all("Hopper" not in name for name, target in chosen(ELSEWHERE, (), every_case=True))
assert {target for name, target in chosen((80,), ("attend",), every_case=False)} == {80}
"""


def use(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Plan for a device of this compute capability."""
    found = Machine(capability=capability, num_multiprocessors=100)
    monkeypatch.setattr(machine, "machine_of", lambda device: found)
    for module in (launch, fp8_prefill, expert_prefill, prefill_attention):
        monkeypatch.setattr(module, "INTERPRETED", False)


@pytest.mark.parametrize(("capability", "early"), [(A100, False), (L40S, False), (H100, True), (RTX_5090, True)])
def test_kernels_start_early_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], early: bool
) -> None:
    use(monkeypatch, capability)

    assert launch.overlapped() == ({"PDL": True, "launch_pdl": True} if early else {"PDL": False})


@pytest.mark.parametrize(("capability", "takes"), [(A100, False), (L40S, False), (H100, True), (RTX_5090, False)])
def test_prompts_are_multiplied_in_8_bits_where_the_library_has_such_products(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], takes: bool
) -> None:
    use(monkeypatch, capability)
    weight = BlockScaled(values=torch.empty(512, 512, dtype=torch.float8_e4m3fn), scales=torch.empty(4, 4))

    assert fp8_prefill.takes_fp8(torch.bfloat16, weight) == takes


@pytest.mark.parametrize(
    ("capability", "kilobytes"), [(A100, 163), ((8, 6), 99), (L40S, 99), (H100, 227), (RTX_5090, 99), ((13, 0), 99)]
)
def test_shared_memory_follows_from_the_compute_capability(capability: tuple[int, int], kilobytes: int) -> None:
    assert machine.shared_bytes_of(Machine(capability=capability, num_multiprocessors=1)) == kilobytes * KB


@pytest.mark.parametrize("shared_kb", [99, 163])
def test_measured_plans_have_fewer_stages_where_shared_memory_is_small_and_nothing_else_changes(shared_kb: int) -> None:
    num_changed = 0
    for plan_key, measured in (
        ("plain", linear_plans.MEASURED),
        ("fp8", linear_plans.MEASURED_FP8),
        ("fp8 rows", linear_plans.MEASURED_FP8_ROWS),
    ):
        for (kind, num_outputs, depth), entries in measured.items():
            for most_tokens, on_hopper in entries:
                if on_hopper is None or on_hopper.programs:  # launched on Hopper alone
                    continue
                weight_bytes = 2 if plan_key == "plain" else 1
                stage = on_hopper.block_k * (on_hopper.block_o * weight_bytes + on_hopper.block_m * 2)
                size = (kind, num_outputs, depth, most_tokens, 2, plan_key)
                plan = linear_plans.plan_for(*size, shared_kb * KB)

                assert linear_plans.plan_for(*size) == on_hopper
                assert plan is not None
                assert (plan.stages - 1) * stage < shared_kb * KB, size
                assert replace(plan, stages=on_hopper.stages) == on_hopper
                num_changed += plan != on_hopper
    assert (num_changed > 0) == (shared_kb == 99)


def test_plans_of_prompts_and_windows_shrink_with_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, L40S)
    bf16 = torch.bfloat16

    assert attention.attend_plan(16, bf16, 256).programs_per_sm == 2
    assert attention.attend_plan(16, bf16, 256, 99 * KB) == (32, 4, 5, 1)
    assert attention.attend_plan(64, bf16, 256, 99 * KB).num_stages == 3
    assert chunked_delta.fold_plan(bf16, 48, 128) == (64, 3)
    assert chunked_delta.fold_plan(bf16, 48, 128, 163 * KB) == (64, 3)
    assert chunked_delta.fold_plan(bf16, 48, 128, 99 * KB) == (64, 2)
    assert prefill_attention.attend_plan(bf16, 256, 64, is_hopper=False, shared_bytes=99 * KB).block_rows == 64
    assert prefill_attention.attend_plan(bf16, 256, 64, is_hopper=False, shared_bytes=163 * KB).block_rows == 128
    assert expert_prefill.gate_up_plan(128, False, bf16).stages == 4
    assert expert_prefill.gate_up_plan(128, False, bf16, 99 * KB).stages == 2


def test_every_kernel_that_other_devices_launch_has_a_compile_case_for_them(tmp_path: Path) -> None:
    environment = compiling_environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", EVERY_KERNEL], env=environment, capture_output=True, timeout=100)

    assert done.returncode == 0, done.stderr.decode()[-2000:]
