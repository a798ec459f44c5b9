"""Gate and up of prompts with SwiGLU, in 16 bits."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import swiglu_hopper
from tests.kernels.triton.compile_case import CompileCase


def _blocks(rows: int, columns: int) -> str:
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{str(block).replace(' ', '')},{layout!r}>"


CASES = [
    CompileCase(
        name="swiglu for Hopper bf16",
        kernel=swiglu_hopper.prompt_swiglu_kernel,
        signature={
            "out": _blocks(64, 128),
            "x": _blocks(128, 64),
            "weights": _blocks(128, 64),
            **dict.fromkeys(("num_tokens", "width", "depth"), "i32"),
        },
        constexprs={"TILES_M": 16, "REGISTERS": 232, "FETCH_REGISTERS": 40},
        multiples_of_16=("width", "depth"),
        instructions=("wgmma.mma_async.sync.aligned.m64n256k16", "cp.async.bulk.tensor"),
    )
]
