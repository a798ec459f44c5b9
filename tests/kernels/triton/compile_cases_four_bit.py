"""Products with 4-bit weights at served shapes, for the compile check."""

from __future__ import annotations

from agentspec.kernels.triton import four_bit_layers
from agentspec.kernels.triton.linear_four_bit import four_bit_kernel
from tests.kernels.triton.compile_case import ELSEWHERE, HOPPER, CompileCase, on_targets

_FORMATS = ("int4", "int4 zeros", "e2m1")


def _case(
    form: str, num_outputs: int, depth: int, num_tokens: int, *, is_swiglu: bool = False, target: int = HOPPER
) -> CompileCase:
    plan = four_bit_layers.plan_for(num_outputs, depth, num_tokens, is_float=form == "e2m1")
    is_float, is_split = form == "e2m1", plan.split > 1
    signature = {
        **dict.fromkeys(("out", "x"), "*bf16"),
        **dict.fromkeys(("out_stride", "x_stride", "num_tokens", "num_outputs"), "i32"),
        "words": "*i32",
        "scales": "*u8" if is_float else "*bf16",
    }
    optional = {
        "zeros": "*u8" if form == "int4 zeros" else None,
        "multipliers": "*fp32" if is_float else None,
        "residual": None if is_swiglu else "*bf16",
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
        multiples_of_16=("out_stride", "x_stride", "num_outputs"),
        instructions=("mma.sync.aligned.m16n8k16", "ld.global.cg.v4"),
    )


def _expand(form: str) -> CompileCase:
    is_float = form == "e2m1"
    signature = {"out": "*bf16", "words": "*i32", "scales": "*u8" if is_float else "*bf16", "depth": "i32"}
    optional = {
        "zeros": "*u8" if form == "int4 zeros" else None,
        "multipliers": "*fp32" if is_float else None,
    }
    return CompileCase(
        name=f"expand {form}",
        kernel=four_bit_layers._expand_kernel,
        signature=signature | {name: kind for name, kind in optional.items() if kind is not None},
        constexprs={name: None for name, kind in optional.items() if kind is None} | {"IS_FLOAT": is_float},
        multiples_of_16=("depth",),
        instructions=("st.global.v4.b32",),
    )


CASES = [
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
    *map(_expand, _FORMATS),
    *(
        case
        for target in ELSEWHERE
        for form in _FORMATS
        for case in on_targets((target,), [_case(form, 5120, 17408, 32, target=target), _expand(form)])
    ),
]
