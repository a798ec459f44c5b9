"""Benchmarks only: drafts that stand at given rates, in Triton. See backend.Backend.

One launch between the choice and the commit, so that timed steps with forced acceptance stay within some microseconds of what they stand for.

Shape letters: as in reference/forcing.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels import slots
from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT
from agentspec.kernels.triton.launch import OVERLAPPED, await_previous, release_next

_ACTIVE = tl.constexpr(slots.ACTIVE)
_LENGTH = tl.constexpr(slots.LENGTH)
_NUM_VALID_DRAFTS = tl.constexpr(slots.NUM_VALID_DRAFTS)
_TOKENS = tl.constexpr(slots.TOKENS)
_SEED = tl.constexpr(slots.SEED)
_PURPOSE_FORCED_ACCEPT = tl.constexpr(PURPOSE_FORCED_ACCEPT)


def force_acceptance(slots_SF: Tensor, limits_SF: Tensor, slot_ids_B: Tensor, chosen_BT: Tensor, rate_K: Tensor) -> Tensor:
    assert chosen_BT.is_contiguous()
    assert rate_K.is_contiguous()
    assert slots_SF.stride(1) == limits_SF.stride(1) == 1
    num_slots, num_columns = chosen_BT.shape
    forced_BT = torch.empty_like(chosen_BT)
    _force_acceptance[(num_slots,)](
        slots_SF,
        slots_SF.stride(0),
        limits_SF,
        limits_SF.stride(0),
        slot_ids_B,
        chosen_BT,
        rate_K,
        forced_BT,
        T=num_columns,
        BLOCK_T=triton.next_power_of_2(num_columns),
        num_warps=1,
        **OVERLAPPED,
    )
    return forced_BT


@triton.jit
def _force_acceptance(  # type: ignore[no-untyped-def]
    slots_SF,
    slots_stride,
    limits_SF,
    limits_stride,
    slot_ids_B,
    chosen_BT,
    rate_K,
    forced_BT,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b: one slot. An inert one keeps its choices, and nothing of it is stored to."""
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    slot_id = tl.load(slot_ids_B + b)
    slot = slots_SF + slot_id * slots_stride
    t = tl.arange(0, BLOCK_T)
    chosen_T = tl.load(chosen_BT + b * T + t, mask=t < T, other=0)
    draft_T = tl.load(slot + _TOKENS + 1 + t, mask=t < T - 1, other=0)
    rate_T = tl.load(rate_K + t, mask=t < T - 1, other=0.0).to(tl.float64)
    is_active = tl.load(slot + _ACTIVE) > 0
    num_valid = tl.where(is_active, tl.minimum(tl.load(slot + _NUM_VALID_DRAFTS), T - 1), 0)
    seed = tl.load(limits_SF + slot_id * limits_stride + _SEED)
    stands_T = (_uniform(seed, tl.load(slot + _LENGTH) + 1 + t) < rate_T) & (t < num_valid)
    num_standing = tl.min(tl.where(stands_T, T, t), axis=0)
    tl.store(forced_BT + b * T + t, tl.where(t < num_standing, draft_T, chosen_T), mask=t < T)
    tl.debug_barrier()  # every lane has what it reads of the slot before any lane stores to it
    tl.store(slot + _TOKENS + 1 + t, tl.full((BLOCK_T,), -1, tl.int64), mask=(t >= num_standing) & (t < num_valid))


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """float64 in (0, 1): the draw of token 0 for PURPOSE_FORCED_ACCEPT at each position. See reference/philox.py."""
    zeros = tl.zeros_like(position).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, zeros, position.to(tl.uint32), zeros + _PURPOSE_FORCED_ACCEPT, zeros)
    return ((word >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08  # 2 ** -24
