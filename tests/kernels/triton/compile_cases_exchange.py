"""The exchanges between ranks, for two ranks and for eight."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from agentspec.kernels.peer_memory import ExchangeLayout
from agentspec.kernels.triton import exchange
from tests.kernels.triton.compile_case import CompileCase

RELEASE, ACQUIRE = "atom.global.sys.release.exch.b64", "ld.global.sys.acquire.b64"
ACQUIRE_ALL = "atom.global.sys.acquire.add.u64"
WIDE_PUSH, WIDE_READ = "st.global.v4", "ld.volatile.global.v4"
MULTIPLES_OF_16 = ("num_elements", "share", "part_stride", "width", "vocab_size")
INTEGERS = ("rank", "num_rounds", "num_tiles", "tiles_a_row", "tiles", *MULTIPLES_OF_16)


def exchange_case(kind: str, ranks: int, partial: str, *, out: str = "bf16") -> CompileCase:
    layout = ExchangeLayout(ranks=ranks)
    kernel = getattr(exchange, f"_{kind}")
    pointers = {"residual": out, "partial": partial, "part": partial, "out": partial, "table": "i64", "bounds": "i64"}
    signature = {name: f"*{pointers[name]}" for name in kernel.arg_names if name in pointers}
    signature |= {name: "i32" for name in kernel.arg_names if name in INTEGERS}
    types: dict[str, Any] = {"bf16": tl.bfloat16, "fp32": tl.float32}
    given = {"DTYPE": types[partial], "OUT_DTYPE": types[out], "BYTES": 2 if partial == "bf16" else 4}
    return CompileCase(
        name=f"{kind} {ranks} ranks {partial}",
        kernel=kernel,
        signature=signature,
        constexprs={name: value for name, value in given.items() if name in kernel.arg_names}
        | getattr(layout, kind).constants(),
        num_warps=4 if kind == "one_shot" else 8,
        multiples_of_16=tuple(name for name in MULTIPLES_OF_16 if name in signature),
        instructions=(
            RELEASE,
            ACQUIRE,  # of the abort word, where flags are polled by one lane a peer
            *([ACQUIRE_ALL] if ranks > 2 else []),
            WIDE_PUSH,
            WIDE_READ,
        ),
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
    exchange_case("one_shot", 2, "fp32"),
    exchange_case("one_shot", 2, "bf16"),
    exchange_case("one_shot", 8, "fp32"),
    exchange_case("two_shot", 2, "bf16"),
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
