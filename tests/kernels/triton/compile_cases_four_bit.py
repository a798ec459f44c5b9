"""Products with 4-bit weights at served shapes, for the compile check."""

from __future__ import annotations

from typing import Any

from agentspec.kernels.triton import four_bit_experts, four_bit_layers
from agentspec.kernels.triton.experts_four_bit import four_bit_down_kernel, four_bit_gate_up_kernel
from agentspec.kernels.triton.grouped_four_bit_hopper import BLOCKS_M, four_bit_prompt_kernel
from agentspec.kernels.triton.linear_four_bit import four_bit_kernel
from tests.kernels.triton.compile_case import ELSEWHERE, HOPPER, CompileCase, on_targets

_FORMATS = ("int4", "int4 zeros", "int4 by 32", "int4 zeros by 32", "e2m1")


def _case(
    form: str,
    num_outputs: int,
    depth: int,
    num_tokens: int,
    *,
    is_swiglu: bool = False,
    is_head: bool = False,
    target: int = HOPPER,
) -> CompileCase:
    plan = four_bit_layers.plan_for(num_outputs, depth, num_tokens, form)
    is_float, is_split = form == "e2m1", plan.split > 1
    signature = {
        **dict.fromkeys(("out", "x"), "*bf16"),
        **({"out": "*fp32"} if is_head else {}),
        **dict.fromkeys(("out_stride", "x_stride", "num_tokens", "num_outputs"), "i32"),
        "words": "*i32",
        "scales": "*u8" if is_float else "*bf16",
    }
    optional = {
        "zeros": "*u8" if "zeros" in form else None,
        "multipliers": "*fp32" if is_float else None,
        "residual": None if is_swiglu or is_head else "*bf16",
        "partial": "*fp32" if is_split else None,
        "arrivals": "*i32" if is_split else None,
    }
    return CompileCase(
        name=f"four_bit {form} {num_outputs} x {depth} M={num_tokens}",
        kernel=four_bit_kernel,
        signature=signature | {name: kind for name, kind in optional.items() if kind is not None},
        constexprs={name: None for name, kind in optional.items() if kind is None}
        | {
            "GROUPS": depth // 128,
            "SPLIT": plan.split,
            "FORMAT": form,
            "SWIGLU": is_swiglu,
            "BLOCK_O": plan.block_o,
            "BLOCK_M": plan.block_m,
            "AHEAD": plan.ahead,
            "SHARES": plan.shares,
            "FAR": plan.far if target >= HOPPER else 0,
            "WARPS": plan.warps,
        },
        num_warps=plan.warps,
        max_registers=plan.max_registers,
        multiples_of_16=("out_stride", "x_stride", "num_outputs"),
        # Two loads of 8 bytes in every round of the loop. Not tuned yet.
        stack_bytes=16 if "by 32" in form and num_tokens > 16 else 0,
        instructions=("mma.sync.aligned.m16n8k16", "ld.global.cg.v4"),
    )


def _expand(form: str) -> CompileCase:
    is_float = form == "e2m1"
    signature = {"out": "*bf16", "words": "*i32", "scales": "*u8" if is_float else "*bf16", "depth": "i32"}
    signature["num_tiles"] = "i32"
    optional = {
        "zeros": "*u8" if "zeros" in form else None,
        "multipliers": "*fp32" if is_float else None,
    }
    return CompileCase(
        name=f"expand {form}",
        kernel=four_bit_layers._expand_kernel,
        signature=signature | {name: kind for name, kind in optional.items() if kind is not None},
        constexprs={name: None for name, kind in optional.items() if kind is None}
        | {"IS_FLOAT": is_float, "SUMS": 4 if "by 32" in form else 1, "TILES": four_bit_layers._EXPANDED_TILES},
        multiples_of_16=("depth",),
        instructions=("st.global.v4.b32",),
    )


def _experts(
    form: str,
    kernel: Any,
    rows: int,
    depth: int,
    *,
    block_m: int,
    in_tiles: bool = False,
    shared: bool = True,
) -> CompileCase:
    """rows: of an expert's matrix. in_tiles: the visits are listed by expert. shared: the shared expert is among the
    routed."""
    is_down = kernel is four_bit_down_kernel
    if is_down:
        plan = four_bit_experts.down_plan(rows, depth, block_m, form)
    else:
        plan = four_bit_experts.gate_up_plan(rows // 2, depth, block_m, form)
    types = {
        **dict.fromkeys(("h", "x"), "*bf16"),
        **dict.fromkeys(("parts", "weights", "multipliers", "shared_multipliers"), "*fp32"),
        **dict.fromkeys(("ids", "pairs", "tiles", "words", "shared_words"), "*i32"),
        **dict.fromkeys(("scales", "shared_scales"), "*u8" if form == "e2m1" else "*bf16"),
        **dict.fromkeys(("zeros", "shared_zeros"), "*u8"),
    }
    absent = [] if in_tiles else ["pairs", "tiles"]
    absent += [] if "zeros" in form else ["zeros", "shared_zeros"]
    absent += [] if form == "e2m1" else ["multipliers", "shared_multipliers"]
    absent += [] if shared else [f"shared_{part}" for part in ("words", "scales", "zeros", "multipliers")]
    constexprs = dict.fromkeys(absent) | {
        "C": 8 + shared,
        "GROUPS": depth // 128,
        "FORMAT": form,
        "BLOCK_O": plan.block_o,
        "BLOCK_M": plan.block_m,
        "AHEAD": plan.ahead,
        "SHARES": plan.shares,
        "UNROLL": depth // 128 <= plan.shares * plan.ahead * four_bit_experts._MOST_STEPS,
        "WARPS": plan.warps,
    }
    names = [name for name in kernel.arg_names if name not in constexprs and name != "PDL"]
    product, listed = "down" if is_down else "gate_up", " listed" * in_tiles + " alone" * (not shared)
    return CompileCase(
        name=f"four_bit experts {product} {form} {rows} x {depth} M={block_m}{listed} "
        f"{plan.block_o}/{plan.shares}/{plan.warps}/{plan.ahead}",
        kernel=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs=constexprs,
        num_warps=plan.warps,
        max_registers=plan.max_registers,
        multiples_of_16=("width", "num_outputs"),
        instructions=(
            "mma.sync.aligned.m16n8k16",
            "ld.global.cg.v4",
            *(["cp.async.bulk.prefetch"] if plan.far else []),
        ),
    )


def _prompt(
    form: str, rows: int, depth: int, *, block_m: int, is_swiglu: bool, warps: int = 4, of_experts: bool = True
) -> CompileCase:
    types = {
        **dict.fromkeys(("out", "x", "residual"), "*bf16"),
        **dict.fromkeys(("weights", "multipliers"), "*fp32"),
        **dict.fromkeys(("pairs", "tiles", "words"), "*i32"),
        "scales": "*u8" if form == "e2m1" else "*bf16",
        "zeros": "*u8",
    }
    absent = [] if "zeros" in form else ["zeros"]
    absent += [] if form == "e2m1" else ["multipliers"]
    absent += ["weights"] if is_swiglu or not of_experts else []
    absent += ["residual"] if is_swiglu or of_experts else []
    absent += [] if of_experts else ["pairs", "tiles"]
    constexprs = dict.fromkeys(absent) | {
        "GROUPS": depth // 128,
        "FORMAT": form,
        "SWIGLU": is_swiglu,
        "BLOCK_M": block_m,
        "WARPS": warps,
    }
    names = [name for name in four_bit_prompt_kernel.arg_names if name not in constexprs and name != "PDL"]
    return CompileCase(
        name=f"four_bit prompt {form} {rows} x {depth} M={block_m} w{warps}"
        + " gated" * is_swiglu
        + " one matrix" * (not of_experts),
        kernel=four_bit_prompt_kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs=constexprs,
        num_warps=warps,
        multiples_of_16=("out_stride", "x_stride", "num_outputs"),
        # With Triton 3.9 what is needed behind the loop is stored before it; the loop itself has none.
        stack_bytes=32 if block_m == 128 else 0,
        instructions=("wgmma.mma_async", "ld.global.v4", "cp.async.cg.shared"),
    )


CASES = [
    *(
        case
        for form in _FORMATS
        for block_m in (BLOCKS_M[:2] if "by 32" in form else BLOCKS_M)
        for case in (
            _prompt(form, 1024, 2048, block_m=block_m, is_swiglu=True),
            _prompt(form, 2048, 512, block_m=block_m, is_swiglu=False),
        )
    ),
    *(
        _prompt(form, rows, depth, block_m=block_m, is_swiglu=is_swiglu, of_experts=False)
        for form in _FORMATS
        for block_m in ((64,) if "by 32" in form or form == "e2m1" else (64, 128))
        for rows, depth, is_swiglu in ((34816, 5120, True), (5120, 17408, False))
    ),
    *(
        case
        for form in _FORMATS
        for block_m, in_tiles in ((8, False), (8, True), (16, True))
        for case in (
            _experts(form, four_bit_gate_up_kernel, 1024, 2048, block_m=block_m, in_tiles=in_tiles),
            _experts(form, four_bit_down_kernel, 2048, 512, block_m=block_m, in_tiles=in_tiles),
        )
    ),
    *(_experts(form, four_bit_gate_up_kernel, 1024, 2048, block_m=8, shared=False) for form in _FORMATS),
    *(_experts(form, four_bit_down_kernel, 2048, 512, block_m=8, shared=False) for form in _FORMATS),
    *(_experts(form, four_bit_gate_up_kernel, 1024, 4096, block_m=8) for form in _FORMATS),
    *(_experts(form, four_bit_down_kernel, 4096, 512, block_m=8) for form in _FORMATS),
    _experts("int4", four_bit_gate_up_kernel, 2048, 4096, block_m=8),
    _experts("int4", four_bit_down_kernel, 4096, 1024, block_m=8),
    *(
        case
        for form in _FORMATS
        for num_tokens in (4, 16, 32)
        for case in (
            _case(form, 34816, 5120, num_tokens, is_swiglu=True),
            _case(form, 5120, 17408, num_tokens),
        )
    ),
    *(_case("int4", *size, 4) for size in ((16384, 5120), (5120, 6144), (12288, 2560), (2560, 9216))),
    _case("int4", 18432, 2560, 4, is_swiglu=True),
    _case("e2m1", 248320, 2048, 4, is_head=True),
    _case("e2m1", 248320, 5120, 32, is_head=True),
    *map(_expand, _FORMATS),
    *(
        case
        for target in ELSEWHERE
        for form in _FORMATS
        for case in on_targets(
            (target,),
            [
                _case(form, 5120, 17408, 32, target=target),
                _expand(form),
                _experts(form, four_bit_gate_up_kernel, 1024, 2048, block_m=16, in_tiles=True),
                _experts(form, four_bit_down_kernel, 2048, 512, block_m=16, in_tiles=True),
            ],
        )
    ),
]
