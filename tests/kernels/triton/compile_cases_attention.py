"""Attention kernels at served shapes, for the compile check."""

from __future__ import annotations

from typing import Any

import torch
import triton

from agentspec.kernels.triton import attention, attention_fp8
from tests.kernels.triton.compile_case import ELSEWHERE, HOPPER, CompileCase, shared_bytes

_PAGE = 64
_NUM_PROGRAMS = 264


def _cases(
    model: str,
    num_slots: int,
    num_columns: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    half_rope: int,
    dtype: torch.dtype,
    target: int = HOPPER,
    *,
    fp8: bool = False,
    is_shared: bool = False,
) -> list[CompileCase]:
    shares = num_heads // num_kv_heads
    block_rows = attention.task_rows(num_columns * shares)
    in_gluon = fp8 and attention.takes_fp8(dtype, head_dim, _PAGE)
    if in_gluon:
        block_rows = min(block_rows, attention_fp8.MOST_ROWS)
    plan = attention.attend_plan(block_rows, dtype, head_dim, shared_bytes(target), fp8=fp8)
    activations = "*fp32" if dtype == torch.float32 else "*bf16"
    shapes: dict[str, Any] = {
        "T": num_columns,
        "G": num_kv_heads,
        "SHARES": shares,
        "BLOCK_B": attention.block_slots(num_slots),
        "BLOCK_M": block_rows,
        "ROW_BLOCKS": triton.cdiv(num_columns * shares, block_rows),
    }
    sizes: dict[str, Any] = {
        "D": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_S": attention_fp8.UNIT if in_gluon else plan.block_keys,
    }
    case = f"{model} B={num_slots} T={num_columns}{' FP8 pages' * fp8}{' live' * is_shared}"
    columns = ("first_B", "count_B")
    live = dict.fromkeys(columns if is_shared else (), "*i64")
    absent: dict[str, Any] = dict.fromkeys(() if is_shared else columns, None)
    pools = {"page_table_BP": "*i32", "num_slots": "i32", "num_pages": "i32", "start_B": "*i64"}
    pools |= {"exponent_P2GS": "*i8"} if fp8 else {}
    no_exponents = {} if fp8 else {"exponent_P2GS": None}
    kv_P2SGD = {"kv_P2SGD": "*u8" if fp8 else activations}
    prepare = CompileCase(
        name=f"prepare {case}",
        kernel=attention._prepare,
        targets=(target,),
        signature={
            "projected_NP": activations,
            "row_stride": "i32",
            "q_norm_D": activations,
            "q_eps": "fp32",
            "k_norm_D": activations,
            "k_eps": "fp32",
            "cos_LA": "*fp32",
            "sin_LA": "*fp32",
            "queries_BGMD": activations,
        }
        | kv_P2SGD
        | {name: kind for name, kind in pools.items() if name != "num_slots"}
        | live,
        constexprs={name: size for name, size in (shapes | sizes).items() if name not in ("BLOCK_B", "BLOCK_S")}
        | absent
        | no_exponents
        | {"PAGE": _PAGE, "A": half_rope, "BLOCK_T": triton.next_power_of_2(num_columns)},
        num_warps=4,
        multiples_of_16=("row_stride",),
        instructions=("ld.global.v4",),
    )
    attend = CompileCase(
        name=f"attend {case}",
        kernel=attention_fp8.attend_fp8 if in_gluon else attention._attend,
        targets=(target,),
        signature={
            "queries_BGMD": activations,
            "scale": "fp32",
            "sums_CMD": "*fp32",
            "scores_2CM": "*fp32",
        }
        | ({"words": "*i32"} if in_gluon else kv_P2SGD)
        | pools
        | {name: kind for name, kind in live.items() if name == "count_B"},
        constexprs={**shapes, **{name: value for name, value in absent.items() if name == "count_B"}, "FIRST": 0}
        | ({} if in_gluon else sizes | no_exponents | {"PAGE": _PAGE, "PRECISION": attention.dot_precision(dtype)}),
        num_warps=attention_fp8.NUM_WARPS if in_gluon else plan.num_warps,
        num_stages=1 if in_gluon else plan.num_stages,
        # A pointer and a count, which are needed once a task.
        stack_bytes=16 * in_gluon,
        instructions=_instructions(dtype, in_gluon=in_gluon),
    )
    num_tasks = num_slots * num_kv_heads
    num_programs = attention.even_programs(_NUM_PROGRAMS, num_tasks)
    partials, block_dims = attention.combine_blocks(num_programs, num_tasks, head_dim)
    combine = CompileCase(
        name=f"combine {case}",
        kernel=attention._combine,
        targets=(target,),
        signature={
            "sums_CMD": "*fp32",
            "scores_2CM": "*fp32",
            "projected_NP": activations,
            "row_stride": "i32",
            "page_table_BP": "*i32",
            "num_slots": "i32",
            "num_pages": "i32",
            "start_B": "*i64",
            "out_NX": activations,
            "max_programs": "i32",
        }
        | live
        | ({"cell_N": "*i64"} if is_shared else {}),
        constexprs=shapes
        | sizes
        | absent
        | ({} if is_shared else {"cell_N": None})
        | {"BLOCK_C": partials, "BLOCK_D": block_dims},
        num_warps=4,
        multiples_of_16=("row_stride",),
        instructions=("ld.global.v4",),
    )
    return [attend, prepare, combine]


def _instructions(dtype: torch.dtype, *, in_gluon: bool) -> tuple[str, ...]:
    if in_gluon:
        return ("mma.sync.aligned.m16n8k16", "ld.global.cg.v4", "st.global.v4")
    return ("cp.async.cg", "ld.global.v4") if dtype == torch.bfloat16 else ("ld.global.v4",)


CASES = [
    _cases("4B", 1, 4, 16, 4, 256, 32, torch.bfloat16, fp8=True)[0],
    _cases("27B", 32, 4, 24, 4, 256, 32, torch.bfloat16, fp8=True)[0],
    _cases("27B", 1, 8, 24, 4, 256, 32, torch.bfloat16, fp8=True)[0],
    *(_cases("27B", 32, 4, 24, 4, 256, 32, torch.bfloat16, target, fp8=True)[0] for target in ELSEWHERE),
    *_cases("4B", 1, 4, 16, 4, 256, 32, torch.bfloat16),
    *_cases("27B", 32, 4, 24, 4, 256, 32, torch.bfloat16),
    _cases("27B", 1, 8, 24, 4, 256, 32, torch.bfloat16)[0],
    *(case for target in ELSEWHERE for case in _cases("27B", 32, 4, 24, 4, 256, 32, torch.bfloat16, target)),
    *(_cases("27B", 1, 8, 24, 4, 256, 32, torch.bfloat16, target)[0] for target in ELSEWHERE),
    *(_cases("4B", 1, 4, 16, 4, 256, 32, torch.bfloat16, target)[0] for target in ELSEWHERE),
    *_cases("4B", 1, 16, 16, 4, 256, 32, torch.bfloat16, is_shared=True),
    *_cases("27B", 4, 16, 24, 4, 256, 32, torch.bfloat16, is_shared=True),
    _cases("27B", 4, 16, 24, 4, 256, 32, torch.bfloat16)[0],
    _cases("4B", 1, 16, 16, 4, 256, 32, torch.bfloat16)[0],
    _cases("tiny-agent", 4, 4, 4, 2, 64, 8, torch.float32)[0],
]
