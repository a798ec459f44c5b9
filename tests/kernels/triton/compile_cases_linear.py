"""The linear kernels at served shapes, by the plans that these have."""

from __future__ import annotations

from typing import Any

import triton

from agentspec.kernels.triton import linear_kernels
from agentspec.kernels.triton.linear_plans import Kind, plan_for
from agentspec.kernels.triton.norm_ahead import LEAST_AHEAD
from tests.kernels.triton.compile_case import ELSEWHERE, EVERYWHERE, HOPPER, CompileCase, shared_bytes

ASYNC_COPIES, WGMMA = "cp.async.cg.shared", "wgmma.mma_async"
PACKED_DECODING, PAIRED_DECODING = "prmt.b32 low", "prmt.b32 pair"
OPERANDS = ("x_ptr", "weight_ptr", "extra_ptr", "norm_ptr", "residual_ptr", "next_norm_ptr", "next_gained_ptr")
INTEGERS = (
    "x_stride",
    "num_parts",
    "num_tokens",
    "num_outputs",
    "num_extra",
    "depth",
    "width",
    "num_real",
    "tiles",
    "ahead",
    "release",
)


_FOLLOWING = ("next_norm_ptr", "next_gained_ptr", "next_squares_ptr")

KERNELS: dict[Kind, Any] = {
    "linear": linear_kernels.linear_kernel,
    "norm_linear": linear_kernels.linear_kernel,
    "add_linear": linear_kernels.linear_kernel,
    "norm_swiglu": linear_kernels.swiglu_kernel,
    "logits": linear_kernels.logits_kernel,
    "draft_argmax": linear_kernels.nearest_kernel,
}


def case(
    name: str,
    kernel: Any,
    constexprs: dict[str, Any],
    warps: int,
    stages: int,
    *instructions: str,
    dtype: str = "bf16",
    weight: str = "",
    stack_bytes: int = 0,
    targets: tuple[int, ...] = (HOPPER,),
) -> CompileCase:
    """`constexprs`: None for absent operands. weight: its type where it is not `dtype`."""
    types = {
        **dict.fromkeys(OPERANDS, f"*{dtype}"),
        **dict.fromkeys(INTEGERS, "i32"),
        "eps": "fp32",
        "partial_ptr": "*fp32",
        "arrivals_ptr": "*i32",
    }
    types |= {"score_ptr": "*fp32", "row_ptr": "*i32", "token_ptr": "*i64", "ids_ptr": "*i64"}
    types |= dict.fromkeys(("scales_ptr", "row_scales_ptr", "squares_ptr", "next_squares_ptr"), "*fp32")
    types["gate_up_ptr"] = f"*{dtype}"
    types["out_ptr"] = "*fp32" if kernel is linear_kernels.logits_kernel else f"*{dtype}"
    types |= {"weight_ptr": f"*{weight}"} if weight else {}
    names = [argument for argument in kernel.arg_names if argument not in constexprs and argument != "PDL"]
    return CompileCase(
        name=name,
        kernel=kernel,
        targets=targets,
        signature={argument: types[argument] for argument in names},
        constexprs=constexprs,
        num_warps=warps,
        num_stages=stages,
        multiples_of_16=tuple(
            argument for argument in ("x_stride", "num_outputs", "num_extra", "depth", "width") if argument in names
        ),
        instructions=instructions,
        stack_bytes=stack_bytes,
    )


def layer(
    model: str,
    kind: Kind,
    num_outputs: int,
    depth: int,
    num_tokens: int,
    *instructions: str,
    dtype: str = "bf16",
    stack_bytes: int = 0,
    fp8: bool = False,
    by_row: bool = False,
    extra: bool = False,
    block_rows: int = 128,
    target: int = HOPPER,
) -> CompileCase:
    """A layer as its plan launches it; with a separate norm only the product. by_row: an 8-bit weight has a scale for
    each row instead of those of blocks."""
    fp8 = fp8 or by_row
    element_bytes, plan_key = 4 if dtype == "fp32" else 2, "fp8 rows" if by_row else "fp8" if fp8 else "plain"
    most = shared_bytes(target)
    # What linear_hopper.py multiplies has cases of its own.
    plan = plan_for(kind, num_outputs, depth, num_tokens, element_bytes, plan_key, most, for_hopper=False)
    assert plan is not None
    constexprs: dict[str, Any] = {
        "BLOCK_O": plan.block_o,
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "EVEN": depth % plan.block_k == 0,
        "RUNNING": plan.running,
    }
    kernel = KERNELS[kind]
    if "scales_ptr" in kernel.arg_names:
        rows = plan.block_o // 2 if kind == "norm_swiglu" else plan.block_o
        constexprs |= (
            {"BLOCK_ROWS": block_rows, "ONE_BLOCK": block_rows % rows == 0}
            if fp8 and not by_row
            else {"scales_ptr": None, "BLOCK_ROWS": 1, "ONE_BLOCK": False}
        )
    if "row_scales_ptr" in kernel.arg_names and not by_row:
        constexprs |= {"row_scales_ptr": None}
    if kernel is linear_kernels.linear_kernel:
        constexprs |= {"SPLIT": plan.split} | ({} if plan.split > 1 else {"partial_ptr": None, "arrivals_ptr": None})
        constexprs |= {} if kind == "add_linear" else {"residual_ptr": None}
        constexprs |= {"EXTRA_O": max(plan.block_o // (2 * plan.split), 16)} | (
            {} if extra else {"extra_ptr": None, "num_extra": None}
        )
        leaves_norm = kind == "add_linear" and fp8 and num_tokens >= LEAST_AHEAD
        constexprs |= {} if leaves_norm else dict.fromkeys(_FOLLOWING)
    if "norm_ptr" in kernel.arg_names:
        has_norm = kind.startswith("norm")
        constexprs |= {} if has_norm and not plan.norm_apart else {"norm_ptr": None}
        # As after a sum that has computed what the norm needs.
        is_ahead = has_norm and plan.norm_apart and fp8 and num_tokens >= LEAST_AHEAD
        parts = {"PARTS": triton.next_power_of_2(depth // 64)}
        constexprs |= parts if is_ahead else dict.fromkeys(("squares_ptr", "num_parts", "PARTS"))
    if fp8 and dtype == "bf16":
        instructions += (WGMMA, PAIRED_DECODING) if plan.takes_pairs else (PACKED_DECODING,)
    name = f"{kind} {model} M={num_tokens} {dtype}{' fp8' * fp8}{' rows' * by_row}"
    weight = ("u16" if plan.takes_pairs else "u8") if fp8 else ""
    return case(
        name,
        kernel,
        constexprs,
        plan.warps,
        plan.stages,
        *instructions,
        dtype=dtype,
        weight=weight,
        stack_bytes=stack_bytes,
        targets=(target,),
    )


def elsewhere(target: int) -> list[CompileCase]:
    """The largest of each kernel and form, with the plans of a target that is no Hopper."""
    return [
        layer("27B", "norm_linear", 16480, 5120, 32, target=target),
        layer("27B", "add_linear", 5120, 17408, 128, target=target),
        layer("4B", "norm_swiglu", 18432, 2560, 64, target=target),
        layer("9B", "logits", 248320, 4096, 128, target=target),
        layer("4B", "draft_argmax", 32768, 2560, 1, target=target),
        layer("35B", "norm_linear", 12288, 2048, 64, fp8=True, extra=True, target=target),
        layer("27B", "norm_swiglu", 34816, 5120, 32, fp8=True, target=target),
        layer("27B", "add_linear", 5120, 17408, 4, fp8=True, target=target),
        layer("35B", "draft_argmax", 32768, 2048, 1, fp8=True, target=target),
        *(layer("27B", "logits", 248320, 5120, tokens, by_row=True, target=target) for tokens in (4, 16, 32, 64)),
        layer("35B", "draft_argmax", 32768, 2048, 1, by_row=True, target=target),
    ]


CASES = [
    layer("4B", "norm_linear", 12352, 2560, 4, ASYNC_COPIES),
    # Measured as the fastest plan with Triton 3.6, which just has enough registers; 3.9 does not.
    layer("9B", "norm_linear", 12352, 4096, 4, ASYNC_COPIES, stack_bytes=8),
    layer("27B", "norm_linear", 16480, 5120, 32, ASYNC_COPIES, WGMMA),
    layer("4B", "add_linear", 2560, 4096, 4, ASYNC_COPIES),
    layer("4B", "add_linear", 2560, 9216, 128, ASYNC_COPIES, WGMMA),
    layer("4B", "norm_swiglu", 18432, 2560, 4, ASYNC_COPIES),
    layer("4B", "norm_swiglu", 18432, 2560, 64, ASYNC_COPIES, WGMMA),
    layer("4B", "logits", 248320, 2560, 4, ASYNC_COPIES),
    layer("4B", "draft_argmax", 32768, 2560, 1, ASYNC_COPIES),
    layer("none", "norm_linear", 2000, 1536, 9, ASYNC_COPIES),
    layer("tiny", "norm_swiglu", 1280, 256, 4, dtype="fp32"),
    layer("tiny", "add_linear", 256, 640, 4, dtype="fp32"),
    case("choose 32k", linear_kernels.choose_kernel, {"BLOCK": 1024, "RANKED": False}, 4, 3, targets=EVERYWHERE),
    case("choose 32k of a rank", linear_kernels.choose_kernel, {"BLOCK": 1024, "RANKED": True}, 4, 3),
    case("swiglu after torch", linear_kernels.gate_kernel, {"BLOCK": 1024}, 4, 3, targets=EVERYWHERE),
    *(item for target in ELSEWHERE for item in elsewhere(target)),
    layer("27B", "norm_linear", 16384, 5120, 4, ASYNC_COPIES, fp8=True, extra=True),
    layer("35B", "norm_linear", 12288, 2048, 64, ASYNC_COPIES, fp8=True, extra=True),
    layer("27B", "norm_swiglu", 34816, 5120, 4, ASYNC_COPIES, fp8=True),
    layer("27B", "norm_swiglu", 34816, 5120, 32, ASYNC_COPIES, fp8=True),
    layer("27B", "add_linear", 5120, 17408, 4, ASYNC_COPIES, fp8=True),
    *(layer("27B", "norm_linear", 16384, 5120, tokens, ASYNC_COPIES, fp8=True, extra=True) for tokens in (32, 64)),
    *(layer("27B", "add_linear", 5120, 6144, tokens, ASYNC_COPIES, fp8=True) for tokens in (32, 64)),
    layer("35B", "draft_argmax", 32768, 2048, 1, ASYNC_COPIES, fp8=True),
    # By the rule, which has a separate norm.
    layer("none", "norm_linear", 12288, 3072, 4, ASYNC_COPIES, fp8=True, extra=True),
    layer("none", "norm_swiglu", 12288, 3072, 64, ASYNC_COPIES, fp8=True),
    layer("tiny", "norm_swiglu", 1280, 256, 4, dtype="fp32", fp8=True, block_rows=8),
    layer("tiny", "norm_linear", 1024, 256, 4, fp8=True, extra=True, block_rows=8),
    *(layer("27B", "logits", 248320, 5120, tokens, ASYNC_COPIES, by_row=True) for tokens in (4, 16, 32, 64)),
    layer("35B", "logits", 248320, 2048, 4, ASYNC_COPIES, by_row=True),
    layer("27B, a rank", "logits", 31040, 5120, 4, ASYNC_COPIES, by_row=True),
    *(layer("27B", "draft_argmax", 32768, 5120, tokens, ASYNC_COPIES, by_row=True) for tokens in (1, 8, 32, 64)),
    layer("35B", "draft_argmax", 32768, 2048, 1, ASYNC_COPIES, by_row=True),
    layer("tiny", "logits", 4096, 272, 9, by_row=True),
    layer("tiny", "logits", 4096, 256, 4, dtype="fp32", by_row=True),
]
