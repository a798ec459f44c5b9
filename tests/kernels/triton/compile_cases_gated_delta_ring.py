"""The recurrent mixer's kernels for slots with rings at served shapes, for the compile check."""

from __future__ import annotations

import triton

from agentspec.kernels.triton import gated_delta_columns, gated_delta_ring
from agentspec.types import RingShape
from tests.kernels.triton.compile_case import ELSEWHERE, CompileCase, on_targets

INTEGERS = ("read_row_B", "slot_B", "start_B", "read_length_B", "fold_length_B", "fold_row_B")


def _shapes(num_columns: int, value_heads: int, key_heads: int, head_dim: int) -> dict[str, int]:
    return gated_delta_columns.window_shapes(
        capacity=RingShape.of(num_columns).capacity,
        num_columns=num_columns,
        num_heads=value_heads,
        num_key_heads=key_heads,
        value_dim=head_dim,
        key_dim=head_dim,
        reads_early=True,
    )


def _columns_case(
    model: str,
    num_columns: int,
    value_heads: int,
    key_heads: int,
    head_dim: int,
    activations: str = "*bf16",
    *,
    is_shared: bool = False,
) -> CompileCase:
    """The first launch."""
    live = ("first_B", "count_B")
    return CompileCase(
        name=f"prepare_columns {model} T={num_columns}{' live' if is_shared else ''}",
        kernel=gated_delta_columns._prepare_columns,
        signature={
            **dict.fromkeys(("projected_NP", "conv_C4", "conv_R3C", "conv_SCX"), activations),
            **dict.fromkeys(("key_SCGK", "decay_SCV", "a_log_V", "dt_bias_V", "columns_BTX"), "*fp32"),
            **dict.fromkeys((*INTEGERS, *(live if is_shared else ())), "*i64"),
            **dict.fromkeys(("x_stride", "conv_stride"), "i32"),
        },
        constexprs={
            **_shapes(num_columns, value_heads, key_heads, head_dim),
            "BLOCK_D": head_dim,
            "WARPS": gated_delta_columns._NUM_WARPS,
            **dict.fromkeys(() if is_shared else live, None),
        },
        num_warps=gated_delta_columns._NUM_WARPS,
        multiples_of_16=("x_stride", "conv_stride"),
        instructions=("st.global.v4.b32",),
    )


def _case(
    model: str, num_columns: int, value_heads: int, key_heads: int, head_dim: int, activations: str = "*bf16", *,
    num_slots: int = 1, is_shared: bool = False
) -> CompileCase:  # fmt: skip
    """The second launch."""
    parts = ("columns_BTX", "ssm_RVDK", "key_SCGK", "delta_SCVD", "decay_SCV", "norm_D", "o_NVD")
    tiling = gated_delta_ring.tiling_of(num_columns, num_slots * value_heads)
    num_warps = tiling.block_d * head_dim // (32 * tiling.lane_elements)
    live = ("first_B", "count_B")
    return CompileCase(
        name=f"gated_delta_ring_step {model} B={num_slots} T={num_columns}{' live' if is_shared else ''}",
        kernel=gated_delta_ring._gated_delta_ring_step,
        signature={
            **dict.fromkeys(("z_NVD", "out_NVD"), activations),
            **dict.fromkeys(parts, "*fp32"),
            **dict.fromkeys((*INTEGERS, *(live if is_shared else ())), "*i64"),
            **dict.fromkeys(("z_stride", "ssm_stride", "num_rows"), "i32"),
            "eps": "fp32",
            "counters": "*i32",
        },
        constexprs={
            **_shapes(num_columns, value_heads, key_heads, head_dim),
            "ENTRY_CHUNKS": gated_delta_ring.entry_chunks(RingShape.of(num_columns).capacity, num_columns),
            "IS_SILU": True,
            "BLOCK_D": tiling.block_d,
            "BLOCK_ROWS": min(
                gated_delta_ring._MAX_ROWS, triton.next_power_of_2(num_columns * value_heads // key_heads)
            ),
            "WARPS": num_warps,
            **dict.fromkeys(() if is_shared else live, None),
        },
        num_warps=num_warps,
        max_registers=tiling.max_registers,
        multiples_of_16=("z_stride", "ssm_stride"),
        instructions=("ld.global.v4.b32", "st.global.v4.b32", "atom.global.gpu.acq_rel"),
    )


CASES = [
    *(_columns_case("27B", num_columns, 48, 16, 128) for num_columns in (1, 3, 4, 8, 16)),
    _columns_case("27B", 16, 48, 16, 128, is_shared=True),
    _columns_case("4B and 35B-A3B", 4, 32, 16, 128),
    _columns_case("tiny-agent fp32", 4, 4, 2, 64, "*fp32"),
    *on_targets(ELSEWHERE, [_columns_case("27B", 16, 48, 16, 128)]),
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
