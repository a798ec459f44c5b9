"""The router's scores of many tokens on Hopper."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import routing_hopper
from tests.kernels.triton.compile_case import CompileCase


def _blocks(rows: int) -> str:
    block = [rows, routing_hopper.FEATURES]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{str(block).replace(' ', '')},{layout!r}>"


def _case(model: str, steps: int, room: int) -> CompileCase:
    return CompileCase(
        name=f"scores for Hopper {model} {steps} steps",
        kernel=routing_hopper.scores_kernel,
        signature={
            "parts_ptr": "*fp32",
            "squares_ptr": "*fp32",
            "x": _blocks(routing_hopper.TOKENS),
            "router": _blocks(routing_hopper.EXPERTS),
            "norm_H": "*bf16",
            **dict.fromkeys(("num_tokens", "num_experts"), "i32"),
        },
        constexprs={"STEPS": steps, "ROOM": room, "FETCH_REGISTERS": 40},
        num_warps=4,
        multiples_of_16=("num_experts",),
        instructions=("wgmma.mma_async.sync.aligned.m64n256k16", "cp.async.bulk.tensor"),
    )


CASES = [_case("35B", 32, 32), _case("35B", 8, 8), _case("122B", 48, 64), _case("397B", 64, 64)]
