"""The recurrent mixer's kernel for slots with rings at served shapes, for the compile check."""

from __future__ import annotations

import triton

from agentspec.kernels.triton import gated_delta_ring
from agentspec.types import RingShape
from tests.kernels.triton.compile_case import ELSEWHERE, CompileCase, on_targets


def _case(
    model: str,
    num_columns: int,
    value_heads: int,
    key_heads: int,
    head_dim: int,
    activations: str = "*bf16",
    *,
    num_slots: int = 1,
    is_shared: bool = False,
) -> CompileCase:
    parts = ("ssm_RVDK", "key_SCGK", "delta_SCVD", "decay_SCV", "a_log_V", "dt_bias_V", "norm_D", "o_NVD")
    tiling = gated_delta_ring.tiling_of(num_columns, num_slots * value_heads)
    num_warps = tiling.block_d * head_dim // (32 * tiling.lane_elements)
    integers = ("read_row_B", "slot_B", "start_B", "read_length_B", "fold_length_B", "fold_row_B")
    return CompileCase(
        name=f"gated_delta_ring_step {model} B={num_slots} T={num_columns}{' live' if is_shared else ''}",
        kernel=gated_delta_ring._gated_delta_ring_step,
        signature={
            **dict.fromkeys(("projected_NP", "conv_C4", "conv_R3C", "conv_SCX", "out_NVD"), activations),
            **dict.fromkeys(parts, "*fp32"),
            **dict.fromkeys(integers, "*i64"),
            **dict.fromkeys(("first_B", "count_B") if is_shared else (), "*i64"),
            **dict.fromkeys(("x_stride", "ssm_stride", "conv_stride", "num_rows"), "i32"),
            "eps": "fp32",
            "counters": "*i32",
        },
        constexprs={
            "CAPACITY": RingShape.of(num_columns).capacity,
            "T": num_columns,
            "ENTRY_CHUNKS": gated_delta_ring.entry_chunks(RingShape.of(num_columns).capacity, num_columns),
            "V": value_heads,
            "REPEATS": value_heads // key_heads,
            "D": head_dim,
            "K": head_dim,
            "IS_SILU": True,
            "EARLY": True,
            "BLOCK_T": triton.next_power_of_2(num_columns),
            "BLOCK_D": tiling.block_d,
            "BLOCK_K": head_dim,
            "BLOCK_ROWS": min(
                gated_delta_ring._MAX_ROWS, triton.next_power_of_2(num_columns * value_heads // key_heads)
            ),
            "WARPS": num_warps,
            **dict.fromkeys(() if is_shared else ("first_B", "count_B"), None),
        },
        num_warps=num_warps,
        max_registers=tiling.max_registers,
        multiples_of_16=("x_stride", "ssm_stride", "conv_stride"),
        instructions=("ld.global.v4.b32", "st.global.v4.b32", "atom.global.gpu.acq_rel"),
    )


CASES = [
    *(
        _case("27B", num_columns, 48, 16, 128, num_slots=num_slots)
        for num_slots in (1, 32)
        for num_columns in (1, 2, 3, 4, 5, 6, 8, 12, 16)
    ),
    *(
        _case("4B and 35B-A3B", num_columns, 32, 16, 128, num_slots=num_slots)
        for num_slots in (1, 32)
        for num_columns in (1, 4, 16)
    ),
    _case("27B", 4, 48, 16, 128, num_slots=8),
    *(_case("27B", 16, 48, 16, 128, num_slots=num_slots, is_shared=True) for num_slots in (1, 4)),
    *(_case("4B and 35B-A3B", 16, 32, 16, 128, num_slots=num_slots, is_shared=True) for num_slots in (1, 4)),
    _case("tiny-agent fp32", 4, 4, 2, 64, "*fp32"),
    *on_targets(ELSEWHERE, [_case("27B", 16, 48, 16, 128, num_slots=num_slots) for num_slots in (1, 32)]),
]
