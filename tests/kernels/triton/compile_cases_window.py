"""Window kernels: 32 slots of a 128k context, k = 3 of at most 7 drafts."""

from __future__ import annotations

from agentspec.kernels.slots import OutcomeRows
from agentspec.kernels.triton import window
from tests.kernels.triton.compile_case import CompileCase

SLOTS = {"slots_SF": "*i64", "slots_stride": "i32", "slot_ids_B": "*i64"}

CASES = [
    CompileCase(
        name="open_window",
        kernel=window._open_window,
        signature={
            **SLOTS,
            **dict.fromkeys(("page_table_SP", "page_table_BP"), "*i32"),
            **dict.fromkeys(("page_table_stride", "num_pages"), "i32"),
            **dict.fromkeys(("tokens_BT", "start_B", "read_row_B", "write_rows_BT"), "*i64"),
        },
        constexprs={"T": 4, "W": 8, "BLOCK_T": 4, "BLOCK_P": 1024},
        multiples_of_16=("page_table_stride", "num_pages"),
        instructions=("ld.global.v4",),
    ),
    CompileCase(
        name="commit_window",
        kernel=window._commit_window,
        signature={
            **SLOTS,
            **dict.fromkeys(("limits_SF", "chosen_BT", "num_accepted_B", "draft_start_B", "outcome_BF"), "*i64"),
            "limits_stride": "i32",
        },
        constexprs={
            "F": OutcomeRows.num_fields(4),
            "T": 4,
            "W": 8,
            "E": 18,
            "BLOCK_TOKENS": 64,
            "BLOCK_T": 4,
            "BLOCK_W": 8,
            "BLOCK_E": 32,
        },
        num_warps=1,
    ),
    CompileCase(
        name="force_acceptance",
        kernel=window._force_acceptance,
        signature={
            **SLOTS,
            **dict.fromkeys(("limits_SF", "chosen_BT", "forced_BT"), "*i64"),
            "limits_stride": "i32",
            "rate_K": "*fp32",
        },
        constexprs={"T": 4, "K": 3, "BLOCK_T": 4},
        num_warps=1,
    ),
    CompileCase(
        name="publish_drafts",
        kernel=window._publish_drafts,
        signature={
            **SLOTS,
            "outcome_BF": "*i64",
            "drafts_Bk": "*i64",
            "drafts_stride_b": "i32",
            "drafts_stride_k": "i32",
            "num_valid_B": "*i64",
        },
        constexprs={"F": OutcomeRows.num_fields(4), "K": 15, "BLOCK_K": 16},
        num_warps=1,
    ),
]
