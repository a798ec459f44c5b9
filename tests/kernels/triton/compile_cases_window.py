"""Window kernels: 32 slots of a 128k context, k = 3 of at most 7 drafts, with rows and with rings. Hiddens of 27B."""

from __future__ import annotations

from agentspec.kernels.slots import OutcomeRows
from agentspec.kernels.triton import hidden, window, window_columns
from agentspec.types import RingShape
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase, on_targets

SLOTS = {"slots_SF": "*i64", "slots_stride": "i32", "slot_ids_B": "*i64"}

RING_RESULTS = ("read_length_B", "fold_length_B", "fold_row_B", "entries_BT")


LIVE_RESULTS = ("first_B", "count_B", "row_BT", "cell_N", "token_N", "entry_N")


def open_window(name: str, ring: RingShape | None, *, is_shared: bool = False) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=window._open_window,
        signature={
            **SLOTS,
            **dict.fromkeys(("page_table_SP", "page_table_BP"), "*i32"),
            **dict.fromkeys(("page_table_stride", "num_pages", "padding_slot", "num_slots"), "i32"),
            **dict.fromkeys(("tokens_BT", "start_B", "read_row_B", "write_rows_BT"), "*i64"),
            **dict.fromkeys(RING_RESULTS if ring else (), "*i64"),
            **dict.fromkeys(LIVE_RESULTS if is_shared else (), "*i64"),
        },
        constexprs={
            "T": 4,
            "W": 8,
            "FOLD_TOKENS": ring.fold_tokens if ring else 0,
            "CAPACITY": ring.capacity if ring else 0,
            "BLOCK_T": 4,
            "BLOCK_P": 1024,
            "BLOCK_B": 8,
            "ROWS": 64 if is_shared else 0,
            "OWN": 4 if is_shared else 0,
            "BLOCK_N": 64 if is_shared else 1,
            **dict.fromkeys(() if ring else RING_RESULTS, None),
            **dict.fromkeys(() if is_shared else LIVE_RESULTS, None),
        },
        multiples_of_16=("page_table_stride", "num_pages"),
        instructions=("ld.global.v4",),
    )


def commit_window(name: str, ring: RingShape | None, *, is_shared: bool = False) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=window._commit_window,
        signature={
            **SLOTS,
            **dict.fromkeys(
                ("limits_SF", "chosen_BT", "num_accepted_B", "draft_start_B", "later_TB", "outcome_BF"), "*i64"
            ),
            "limits_stride": "i32",
        }
        | ({"count_B": "*i64"} if is_shared else {}),
        constexprs=({} if is_shared else {"count_B": None})
        | {
            "F": OutcomeRows.num_fields(4),
            "T": 4,
            "W": 8,
            "E": 18,
            "BLOCK_TOKENS": 64,
            "FOLD_TOKENS": ring.fold_tokens if ring else 0,
            "BLOCK_T": 4,
            "BLOCK_W": 8,
            "BLOCK_E": 32,
        },
        num_warps=1,
    )


CASES = on_targets(
    EVERYWHERE,
    [
        open_window("open_window", None),
        open_window("open_window of rings", RingShape.of(8)),
        open_window("open_window of shared rows", RingShape.of(8), is_shared=True),
        commit_window("commit_window", None),
        commit_window("commit_window of rings", RingShape.of(8)),
        commit_window("commit_window of shared rows", RingShape.of(8), is_shared=True),
        CompileCase(
            name="fold_hidden 27B",
            kernel=hidden._fold_hidden,
            signature={
                **dict.fromkeys(("hidden_RH", "hidden_SCH"), "*bf16"),
                "pool_stride": "i32",
                **dict.fromkeys(("slot_B", "fold_length_B", "fold_row_B"), "*i64"),
            },
            constexprs={"CAPACITY": RingShape.of(8).capacity, "H": 5120, "BLOCK_H": 1024},
            multiples_of_16=("pool_stride",),
            instructions=("ld.global.v4",),
        ),
        CompileCase(
            name="take_columns 27B",
            kernel=window_columns._take_columns,
            signature={
                **dict.fromkeys(("x_BH", "x_NH", "y_BX", "y_NX"), "*bf16"),
                **dict.fromkeys(("x_stride", "y_stride"), "i32"),
                "column_B": "*i64",
            },
            constexprs={"T": 4, "H": 5120, "X": 6144, "BLOCKS": 5, "BLOCK": 1024},
            multiples_of_16=("x_stride", "y_stride"),
            instructions=("ld.global.v4",),
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
            constexprs={"T": 4, "K": 3, "BLOCK_T": 4, "count_B": None},
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
    ],
)
