"""The router's scores of many tokens on Hopper."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import routing_hopper
from tests.kernels.triton.compile_case import CompileCase


def _blocks(rows: int) -> str:
    block = [rows, routing_hopper.FEATURES]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{str(block).replace(' ', '')},{layout!r}>"


def _case(model: str, steps: int, room: int, *, adds: bool = False) -> CompileCase:
    tokens = _blocks(routing_hopper.TOKENS)
    sums = ("product", "summed")
    return CompileCase(
        name=f"scores for Hopper {model} {steps} steps{' of sums' if adds else ''}",
        kernel=routing_hopper.scores_kernel,
        signature={
            "parts_ptr": "*fp32",
            "squares_ptr": "*fp32",
            "x": tokens,
            **(dict.fromkeys(sums, tokens) if adds else {}),
            "router": _blocks(routing_hopper.EXPERTS),
            "norm_H": "*bf16",
            **dict.fromkeys(("num_tokens", "num_experts"), "i32"),
        },
        constexprs={
            "STEPS": steps,
            "ROOM": room,
            **routing_hopper.REGISTERS,
            **({} if adds else dict.fromkeys(sums)),
        },
        num_warps=4,
        multiples_of_16=("num_experts",),
        instructions=(
            "wgmma.mma_async.sync.aligned.m64n256k16",
            "cp.async.bulk.tensor",
            *(("add.rn.bf16x2", "cp.async.bulk.wait_group.read") if adds else ()),
        ),
    )


SIZES = (("35B", 32, 16), ("35B", 8, 4), ("122B", 48, 32), ("397B", 64, 32), ("small", 7, 4), ("small", 1, 1))
CASES = [_case(*size, adds=adds) for size in SIZES for adds in (False, True)]
