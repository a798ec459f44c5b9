"""The copy drafter's kernels: texts of 262,144 tokens, 3 drafts and 12 copies."""

from __future__ import annotations

from agentspec.kernels.slots import OutcomeRows
from agentspec.kernels.triton import copies
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase, on_targets

TEXTS = {"text_SL": "*i32", "text_stride": "i32", "slot_ids_B": "*i64", "outcome_BF": "*i64"}


def _draft_copies(num_drafts: int) -> CompileCase:
    return CompileCase(
        name=f"draft_copies k={num_drafts}",
        kernel=copies._draft_copies,
        signature={
            **TEXTS,
            **dict.fromkeys(("drafts_Bk", "copies_Bc", "num_copies_B"), "*i64"),
            **dict.fromkeys(("num_positions", "drafts_stride_b", "drafts_stride_k", "min_match"), "i32"),
            "counters": "*i32",
        },
        constexprs={
            "F": OutcomeRows.num_fields(num_drafts + 13),
            "K": num_drafts,
            "C": 12,
            "BLOCK_E": copies._BLOCK,
            "BLOCK_K": 4 if num_drafts else 1,
            "BLOCK_C": 16,
        },
        num_warps=1,
        multiples_of_16=("text_stride", "num_positions"),
        instructions=("ld.global.v4", "atom.global.gpu.acq_rel", "griddepcontrol.wait"),
    )


CASES = [
    CompileCase(
        name="append_text",
        targets=EVERYWHERE,
        kernel=copies._append_text,
        signature=TEXTS,
        constexprs={"F": OutcomeRows.num_fields(16), "T": 16, "BLOCK_T": 16},
        num_warps=1,
        multiples_of_16=("text_stride",),
    ),
    _draft_copies(0),
    *on_targets(EVERYWHERE, [_draft_copies(3)]),
]
