"""The kernels of a mixture of experts at the shapes of 35B-A3B (256 experts of 512, 8 of them and the shared one a
token), and of a tiny one."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton

from agentspec.kernels.triton import expert_groups, experts, routing
from agentspec.kernels.triton.experts import Tiles
from agentspec.kernels.triton.mixture import down_tiles, gate_up_tiles
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Plain, Weight
from tests.kernels.triton.compile_case import EVERYWHERE, CompileCase, on_targets

ASYNC_COPIES, TENSOR_CORES, OF_FOUR_WARPS = "cp.async.cg.shared", "mma.", "wgmma.mma_async"
Form = Literal["fp8", "bf16", "fp32"]

INTEGERS = (
    "x_stride",
    "num_tokens",
    "num_rows",
    "num_experts",
    "first_expert",
    "num_held",
    "absent",
    "num_pairs",
    "block_m",
    "width",
    "num_outputs",
    "depth",
    "ahead",
    "release",
)
FLOATS = (
    "scales_ptr",
    "scales_GR",
    "scales_RG",
    "shared_scales_ptr",
    "parts_ptr",
    "squares_ptr",
    "weights_ptr",
    "gates_ptr",
    "gate_ptr",
)
INDICES = ("ids_ptr", "pairs_ptr", "tiles_ptr", "runs_ptr", "counts_ptr")
VALUES = ("stack_ptr", "shared_ptr")
MULTIPLES = ("x_stride", "width", "num_outputs", "depth")


def case(
    name: str,
    kernel: Any,
    constexprs: dict[str, Any],
    warps: int,
    stages: int,
    *instructions: str,
    dtype: str,
    weights: str = "bf16",
) -> CompileCase:
    """`constexprs`: None for absent operands. weights: type of the experts' values."""
    types = {
        **dict.fromkeys(INTEGERS, "i32"),
        **dict.fromkeys(FLOATS, "*fp32"),
        **dict.fromkeys(INDICES, "*i32"),
        "eps": "fp32",
    }
    types |= dict.fromkeys(VALUES, f"*{weights}")
    if "scales_GR" in kernel.arg_names and "scales_GR" not in constexprs:
        types["normed_ptr"] = "*fp8e4nv"
    names = [argument for argument in kernel.arg_names if argument not in constexprs and argument != "PDL"]
    return CompileCase(
        name=name,
        kernel=kernel,
        signature={argument: types.get(argument, f"*{dtype}") for argument in names},
        constexprs=constexprs,
        num_warps=warps,
        num_stages=stages,
        multiples_of_16=tuple(argument for argument in MULTIPLES if argument in names),
        instructions=instructions,
    )


def product(
    kernel: Any, form: Form, num_tokens: int, rows: int, depth: int, *, shared: bool = True, tiles: Tiles | None = None
) -> CompileCase:
    dtype = "fp32" if form == "fp32" else "bf16"
    is_down = kernel is experts._down_kernel
    activations = torch.float32 if form == "fp32" else torch.bfloat16
    tiles = tiles or (down_tiles if is_down else gate_up_tiles)(meta_weight(form, rows, depth), activations, num_tokens)
    absent = {} if form == "fp8" else {"scales_ptr": None, "shared_scales_ptr": None}
    absent |= {} if shared else {"shared_ptr": None, "shared_scales_ptr": None}
    absent |= {"pairs_ptr": None, "tiles_ptr": None} if num_tokens <= experts.FEW_TOKENS else {}
    constexprs = {
        "C": 9 if shared else 8,
        "BLOCK_ROWS": SCALE_BLOCK,
        "ONE_BLOCK": True,
        "BLOCK_O": tiles.block_o,
        "BLOCK_M": 8 if num_tokens <= 8 else 16,
        "BLOCK_K": tiles.block_k,
        "BLOCK_C": 16 if shared else 8,
        "EVEN": depth % tiles.block_k == 0,
    }
    product = "down" if is_down else "gate_up"
    name = f"{product} {form} {rows}x{depth} N={num_tokens}{' shared' * shared} {tiles_text(tiles)}"
    instructions = (
        ()
        if form == "fp32"
        else (
            ASYNC_COPIES,
            OF_FOUR_WARPS if tiles.block_o >= 64 and tiles.warps == 4 and num_tokens > 8 else TENSOR_CORES,
        )
    )
    weights = {"fp8": "u8", "bf16": "bf16", "fp32": "fp32"}[form]
    return case(
        name, kernel, absent | constexprs, tiles.warps, tiles.stages, *instructions, dtype=dtype, weights=weights
    )


def meta_weight(form: Form, rows: int, depth: int) -> Weight:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if form != "fp8":
        return Plain(empty(1, rows, depth, dtype=torch.float32 if form == "fp32" else torch.bfloat16))
    scales = empty(1, -(-rows // SCALE_BLOCK), -(-depth // SCALE_BLOCK), dtype=torch.float32)
    return BlockScaled(values=empty(1, rows, depth, dtype=torch.float8_e4m3fn), scales=scales)


def tiles_text(tiles: Tiles) -> str:
    return f"{tiles.block_o}/{tiles.block_k} w{tiles.warps} s{tiles.stages}"


def many_scores(num_tokens: int) -> CompileCase:
    tiles = routing.score_tiles(num_tokens, 256, 2048, 2)
    blocks = {
        "BLOCK_N": tiles.block_n,
        "BLOCK_X": tiles.block_x,
        "BLOCK_K": tiles.block_k,
        "H": 2048,
        "SHARE": 2048 // tiles.split,
        "AHEAD": 4,
    }
    instructions = (ASYNC_COPIES, OF_FOUR_WARPS if tiles.block_n >= 64 else TENSOR_CORES)
    return case(
        f"scores 35B N={num_tokens}",
        routing._many_scores_kernel,
        blocks,
        tiles.warps,
        tiles.stages,
        *instructions,
        dtype="bf16",
    )


def few_scores(width: int = 2048, *, tokens: int = 4, norms: bool = True) -> CompileCase:
    """tokens: of a program. norms: False where the normed input is in 8 bits."""
    blocks = {
        "H": width,
        "J": 8,
        "C": 9,
        "TOKENS": tokens,
        "ROWS": 4 if width > 3072 else 2,
        "BLOCK_H": 2048,
        "ROW_BLOCK": min(triton.next_power_of_2(width), 4096),
        "gates_ptr": None,
    }
    return case(
        f"few scores of {width} for {tokens}" + " of 8 bits" * (not norms),
        routing._few_scores_kernel,
        blocks if norms else blocks | {"normed_ptr": None},
        8,
        3,
        dtype="bf16",
    )


def choice(split: int, *, partial: bool = False, norms: bool = True) -> CompileCase:
    """partial: of a rank that holds some experts. norms: False for few tokens."""
    blocks = {
        "J": 8,
        "C": 9,
        "SPLIT": split,
        "NORMALIZE": True,
        "PARTIAL": partial,
        "NORMS": norms,
        "BLOCK_X": 256,
        "BLOCK_C": 16,
        "H": 2048,
        "BLOCK_H": 1024,
        "gates_ptr": None,
    }
    blocks |= {"scales_GR": None, "scales_RG": None}
    # One instruction finds the largest of a warp's integers.
    return case(
        f"choice 35B of {split} parts" + " by a rank" * partial + " alone" * (not norms),
        routing._choose_kernel,
        blocks,
        1,
        3,
        "redux.sync.max.s32",
        dtype="bf16",
        weights="u8",
    )


def scaled_choice() -> CompileCase:
    """Of a prompt: the normed input in 8 bits."""
    blocks = {
        "J": 8,
        "C": 8,
        "SPLIT": 1,
        "NORMALIZE": True,
        "PARTIAL": False,
        "NORMS": True,
        "BLOCK_X": 256,
        "BLOCK_C": 8,
        "H": 2048,
        "BLOCK_H": 1024,
    }
    return case(
        "choice 35B of 1 part, in 8 bits",
        routing._choose_kernel,
        blocks,
        1,
        3,
        "st.global.v4",
        dtype="bf16",
        weights="u8",
    )


def groups(kernel: Any, warps: int, **blocks: int) -> CompileCase:
    text = " ".join(f"{name} {size}" for name, size in blocks.items())
    return case(f"groups{kernel.__name__} {text}", kernel, blocks, warps, 3, dtype="bf16")


LARGEST = [
    product(experts._gate_up_kernel, "fp8", 128, 1024, 2048),
    product(experts._down_kernel, "fp8", 128, 2048, 512),
    product(experts._gate_up_kernel, "bf16", 16, 1024, 2048, shared=False),
    product(experts._down_kernel, "bf16", 16, 2048, 512),
    many_scores(256),
    choice(1),
    groups(expert_groups._few_kernel, 16, BLOCK_P=2048),
    groups(expert_groups._count_kernel, 4, CHUNK=512, BLOCK_X=256),
    groups(expert_groups._many_kernel, 16, CHUNK=512, BLOCK_X=256, BLOCK_C=32),
    case("visits added 35B", experts._add_visits_kernel, {"C": 8, "BLOCK_O": 512}, 4, 3, dtype="bf16"),
    few_scores(),
]
CASES = [
    *on_targets(EVERYWHERE, LARGEST),
    product(experts._gate_up_kernel, "fp8", 4, 1024, 2048),
    product(experts._gate_up_kernel, "fp32", 4, 64, 256),
    product(experts._down_kernel, "fp8", 4, 2048, 512),
    *(many_scores(num_tokens) for num_tokens in (32, 8192)),
    choice(1, partial=True),
    choice(16),
    choice(1, norms=False),
    few_scores(3072),
    few_scores(4096, tokens=1),
    few_scores(8192),
    few_scores(norms=False),
    case(
        "visits added, no residual",
        experts._add_visits_kernel,
        {"C": 8, "BLOCK_O": 512, "residual_ptr": None},
        4,
        3,
        dtype="bf16",
    ),
    *on_targets((90, 89, 120), [scaled_choice()]),
    groups(expert_groups._many_kernel, 8, CHUNK=256, BLOCK_X=256, BLOCK_C=16),
]
