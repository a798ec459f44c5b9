"""The exchanges between ranks, for two ranks and for eight."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from agentspec.kernels.peer_memory import ExchangeLayout
from agentspec.kernels.triton import exchange
from agentspec.kernels.triton.exchange_one_shot import one_shot_kernel
from tests.kernels.triton.compile_case import CompileCase

RELEASE, ACQUIRE = "atom.global.sys.release.exch.b64", "ld.global.sys.acquire.b64"
ACQUIRE_ALL = "atom.global.sys.acquire.add.u64"
WIDE_PUSH, WIDE_READ = "st.global.v4", "ld.volatile.global.v4"
TAGGED_PUSH, TAGGED_READ = "st.relaxed.sys.global.b64", "ld.volatile.global"
TYPES: dict[str, Any] = {"bf16": tl.bfloat16, "fp32": tl.float32}
MULTIPLES_OF_16 = ("num_elements", "share", "part_stride", "width", "vocab_size")
INTEGERS = ("rank", "num_rounds", "num_tiles", "tiles_a_row", "tiles", *MULTIPLES_OF_16)


def exchange_case(kind: str, ranks: int, partial: str, *, out: str = "bf16") -> CompileCase:
    layout = ExchangeLayout(ranks=ranks)
    kernel = getattr(exchange, f"_{kind}")
    pointers = {"residual": out, "partial": partial, "part": partial, "out": partial, "table": "i64", "bounds": "i64"}
    signature = {name: f"*{pointers[name]}" for name in kernel.arg_names if name in pointers}
    signature |= {name: "i32" for name in kernel.arg_names if name in INTEGERS}
    given = {"DTYPE": TYPES[partial], "OUT_DTYPE": TYPES[out], "BYTES": 2 if partial == "bf16" else 4}
    channel = layout.two_shot if kind == "paired" else getattr(layout, kind)
    constants = channel.constants() | ({"BLOCK": exchange.PAIRED_BLOCKS * channel.block} if kind == "paired" else {})
    return CompileCase(
        name=f"{kind} {ranks} ranks {partial}",
        kernel=kernel,
        signature=signature,
        constexprs={name: value for name, value in given.items() if name in kernel.arg_names} | constants,
        num_warps=16 if kind == "paired" else 8,
        multiples_of_16=tuple(name for name in MULTIPLES_OF_16 if name in signature),
        instructions=(
            RELEASE,
            ACQUIRE,  # of the abort word, where flags are polled by one lane a peer
            *([ACQUIRE_ALL] if ranks > 2 else []),
            WIDE_PUSH,
            WIDE_READ,
        ),
    )


def one_shot_case(ranks: int, dtype: str, width: int, *, has_norm: bool, is_fresh: bool = False) -> CompileCase:
    """One element type for all; `width` elements a row."""
    block = triton.next_power_of_2(width * TYPES[dtype].primitive_bitwidth // 64)
    tensors = ("residual", "partial", *(("normed", "gain") if has_norm else ()))
    return CompileCase(
        name=f"one_shot {ranks} ranks {dtype} {width}{' with norm' if has_norm else ''}{' fresh' if is_fresh else ''}",
        kernel=one_shot_kernel,
        signature=dict.fromkeys(tensors, f"*{dtype}")
        | {"eps": "fp32", "table": "*i64", "rank": "i32", "num_rows": "i32"},
        constexprs={"DTYPE": TYPES[dtype], "FRESH": is_fresh, "H": width, "BLOCK": block}
        | ({} if has_norm else {"normed": None, "gain": None})
        | ExchangeLayout(ranks=ranks).one_shot.places(),
        num_warps=exchange.one_shot_warps(block, ranks),
        instructions=(TAGGED_PUSH, TAGGED_READ, ACQUIRE),
    )


def winners_case(ranks: int) -> CompileCase:
    return CompileCase(
        name=f"winners {ranks} ranks",
        kernel=exchange._winners,
        signature={
            "best": "*i64",
            "num_blocks": "i32",
            "out": "*i64",
            "table": "*i64",
            "rank": "i32",
            "num_rows": "i32",
        },
        constexprs={"BLOCK_C": 32} | ExchangeLayout(ranks=ranks).winners.constants(),
        instructions=(RELEASE, ACQUIRE),
    )


CASES = [
    one_shot_case(2, "bf16", 5120, has_norm=True),
    one_shot_case(2, "bf16", 4096, has_norm=False),
    one_shot_case(2, "bf16", 4096, has_norm=True, is_fresh=True),
    one_shot_case(2, "fp32", 2560, has_norm=True),
    one_shot_case(8, "bf16", 3072, has_norm=True),
    exchange_case("paired", 2, "bf16"),
    exchange_case("paired", 2, "fp32"),
    exchange_case("two_shot", 4, "bf16"),
    exchange_case("two_shot", 8, "fp32"),
    exchange_case("gather", 2, "fp32"),
    exchange_case("gather", 8, "fp32"),
    winners_case(2),
    winners_case(8),
    *(
        CompileCase(
            name=f"part_best {kind}",
            kernel=exchange._part_best,
            signature={
                "logits": "*fp32",
                **dict.fromkeys(("stride", "width", "first_id", "vocab_size"), "i32"),
                **({"ids": "*i64"} if kind == "draft head" else {}),
                "best": "*i64",
            },
            constexprs={"BLOCK": exchange.PART_BLOCK} | ({} if kind == "draft head" else {"ids": None}),
            num_warps=8,
            multiples_of_16=("stride", "width"),
            instructions=("ld.global.v4",),
        )
        for kind in ("head", "draft head")
    ),
]
