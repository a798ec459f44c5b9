"""The sampler and argmax at the family's vocabulary and at tiny-agent's."""

from __future__ import annotations

from agentspec.kernels.triton import sampling
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase, on_targets

PARAMETERS = {
    "slot_ids_B": "*i64",
    "limits_SF": "*i64",
    "limits_stride": "i32",
    "sampling_SF": "*fp32",
    "sampling_stride": "i32",
}
LOGITS = {"logits_BTV": "*fp32", "tokens_BT": "*i64", "counts_SV": "*i32", "prompt_seen_SV": "*u8", "bias_SV": "*fp32"}
LISTS = {"tops_NG": "*i32", "tally_N2": "*i64", "listed_NV": "*i32", "bounds_N3": "*fp32"}
WIDE = ("ld.global.v4",)


def mask(constrained: bool) -> tuple[dict[str, str], dict[str, None]]:
    return ({"mask_SWX": "*i32"}, {}) if constrained else ({}, {"mask_SWX": None})


def cases_of(vocab_size: int, constrained: bool, *, is_shared: bool = False) -> list[CompileCase]:
    case = f"V={vocab_size}{' constrained' if constrained else ''}{' live' if is_shared else ''}"
    signature, absent = mask(constrained)
    shape = {"V": vocab_size, "T": 4, "SPAN": sampling.SPAN} | ({} if is_shared else {"cell_N": None})
    parameters = PARAMETERS | ({"cell_N": "*i64"} if is_shared else {})
    logits, block = {**parameters, **LOGITS, **signature}, {"BLOCK_G": 1 << (vocab_size // sampling.SPAN).bit_length()}
    return [
        CompileCase(
            name=f"span_tops {case}",
            kernel=sampling._span_tops,
            signature={**logits, "tops_NG": "*i32", "tally_N2": "*i64"},
            constexprs={**absent, **shape, "W": 8, "SPANS": sampling.SPANS_A_PROGRAM},
            num_warps=8,
            instructions=WIDE,
        ),
        CompileCase(
            name=f"collect {case}",
            kernel=sampling._collect,
            signature={**logits, **LISTS},
            constexprs={**absent, **shape, **block, "W": 8},
            instructions=WIDE,
        ),
        CompileCase(
            name=f"select {case}",
            kernel=sampling._select,
            signature={**parameters, **LISTS},
            constexprs={**shape, **block, "CHUNK": sampling.SELECT_CHUNK},
            num_warps=16,
        ),
        CompileCase(
            name=f"draw {case}",
            kernel=sampling._draw,
            signature={**logits, "position_BT": "*i64", "tops_NG": "*i32", "bounds_N3": "*fp32", "best_NC": "*i64"},
            constexprs={**absent, **shape, "W": 8},
            instructions=WIDE,
        ),
    ]


CASES = [
    *on_targets(EVERYWHERE, cases_of(248_320, constrained=True)),
    *cases_of(4_096, constrained=False),
    *cases_of(248_320, constrained=True, is_shared=True),
    CompileCase(
        name="block_best V=248320",
        targets=EVERYWHERE,
        kernel=sampling._block_best,
        signature={"logits_NV": "*fp32", "best_NC": "*i64"},
        constexprs={"V": 248_320, "BLOCK": sampling.ARGMAX_BLOCK},
        num_warps=8,
        instructions=WIDE,
    ),
    CompileCase(
        name="best of 485",
        targets=EVERYWHERE,
        kernel=sampling._best,
        signature={"best_NC": "*i64", "num_programs": "i32", "out_N": "*i64"},
        constexprs={"BLOCK_C": 512},
    ),
]
