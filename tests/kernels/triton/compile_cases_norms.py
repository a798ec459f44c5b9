"""The RMS norms at served shapes."""

from __future__ import annotations

from agentspec.kernels.triton import norms
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase, on_targets

WIDE = ("ld.global.v4",)


def rms_norm(
    name: str, width: int, *, block_rows: int, block: int, num_warps: int, to_rows: bool, kind: str = "bf16"
) -> CompileCase:
    pointers = dict.fromkeys(("x_NH", "weight_H", "out_NH", *(["hidden_RH"] if to_rows else [])), f"*{kind}")
    return CompileCase(
        name=name,
        kernel=norms._rms_norm,
        signature={**pointers, "x_stride": "i32", "eps": "fp32", "num_rows": "i32", "hidden_stride": "i32"}
        | ({"write_rows_N": "*i64"} if to_rows else {}),
        constexprs={"H": width, "BLOCK_N": block_rows, "BLOCK_H": block}
        | ({} if to_rows else {"hidden_RH": None, "write_rows_N": None}),
        num_warps=num_warps,
        multiples_of_16=("x_stride", "hidden_stride"),
        instructions=WIDE,
    )


CASES = [
    rms_norm("rms_norm 4B prefill", 2560, block_rows=1, block=4096, num_warps=8, to_rows=False),
    *on_targets(EVERYWHERE, [rms_norm("norm_to_rows 27B", 5120, block_rows=1, block=8192, num_warps=16, to_rows=True)]),
    CompileCase(
        name="pair_norms 4B",
        targets=EVERYWHERE,
        kernel=norms._pair_norms,
        signature={
            "tokens_N": "*i64",
            **dict.fromkeys(("embedding_VH", "hidden_NH", "embedding_weight_H", "hidden_weight_H", "out"), "*bf16"),
            **dict.fromkeys(("embedding_stride", "hidden_stride"), "i32"),
            **dict.fromkeys(("embedding_eps", "hidden_eps"), "fp32"),
        },
        constexprs={"H": 2560, "BLOCK_H": 4096},
        num_warps=8,
        multiples_of_16=("embedding_stride", "hidden_stride"),
        instructions=WIDE,
    ),
]
