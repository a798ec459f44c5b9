"""The recurrent mixer's kernel at served shapes, for the compile check."""

from __future__ import annotations

import triton

from agentspec.kernels.triton import gated_delta
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase, on_targets


def _case(
    model: str, num_columns: int, value_heads: int, key_heads: int, head_dim: int, activations: str = "*bf16"
) -> CompileCase:
    return CompileCase(
        name=f"gated_delta_step {model} T={num_columns}",
        kernel=gated_delta._gated_delta_step,
        signature={
            "projected_NP": activations,
            "x_stride": "i32",
            "conv_C4": activations,
            "a_log_V": "*fp32",
            "dt_bias_V": "*fp32",
            "norm_D": "*fp32",
            "eps": "fp32",
            "ssm_RVDK": "*fp32",
            "ssm_stride": "i32",
            "conv_R3C": activations,
            "conv_stride": "i32",
            "read_row_B": "*i64",
            "write_rows_BT": "*i64",
            "o_NVD": "*fp32",
            "out_NVD": activations,
            "counters": "*i32",
        },
        constexprs={
            "T": num_columns,
            "V": value_heads,
            "REPEATS": value_heads // key_heads,
            "D": head_dim,
            "K": head_dim,
            "IS_SILU": True,
            "BLOCK_D": gated_delta._BLOCK_D,
            "BLOCK_K": head_dim,
            "CHUNK": gated_delta._CHUNK,
            "BLOCK_ROWS": min(gated_delta._MAX_ROWS, triton.next_power_of_2(num_columns * value_heads // key_heads)),
        },
        num_warps=gated_delta._NUM_WARPS,
        multiples_of_16=("x_stride", "ssm_stride", "conv_stride"),
        instructions=("ld.global.v4.b32", "st.global.v4.b32", "atom.global.gpu.acq_rel"),
    )


CASES = [
    _case("4B", 4, 32, 16, 128),
    *on_targets(EVERYWHERE, [_case("27B", 4, 48, 16, 128)]),
    _case("tiny-agent fp32", 4, 4, 2, 64, "*fp32"),
]
