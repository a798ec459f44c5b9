"""Time a decode window's attention over pages: `python -m benchmarks.attention` on a CUDA device.

One layer, all its launches, in a graph: head norms, RoPE, stores of the window, attention and the gate. Projections,
keys and values are random. The floor is the bytes of keys and values (and their exponents) over the read bandwidth
measured in the same run. First the kernels are compared with the reference in float32 on a short context.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels.backend import AttentionWeights, Norm, RopeTable
from agentspec.kernels.triton.attention import attention_step
from agentspec.kernels.weights import FP8
from agentspec.models.hf_config import TextConfig
from agentspec.types import BLOCK_TOKENS
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.linear import seconds_a_launch
from benchmarks.published import CONFIGS, KV_DTYPES

CHECKED_CONTEXT = 300
TOLERANCE = 0.03
"""Relative error. The window's own keys may be rounded to other codes than the reference's."""
EXPONENTS = (-9, -6)
"""Of random heads in FP8: values of about one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Inputs of one layer. All users have the same context."""

    projected_NP: Tensor
    weights: AttentionWeights
    rope: RopeTable
    kv_P2SGD: Tensor
    exponent_P2GS: Tensor | None
    page_table_BP: Tensor
    start_B: Tensor

    @property
    def bytes_read(self) -> int:
        pages, start, tokens = self.kv_P2SGD[0], int(self.start_B[0]), self.kv_P2SGD.shape[2]
        exponents = 0 if self.exponent_P2GS is None else self.exponent_P2GS[0].nbytes
        return len(self.start_B) * start * (pages.nbytes + exponents) // tokens

    def to_float(self) -> Window:
        """On the CPU, activations in float32; pages in FP8 stay so."""

        def norm(old: Norm) -> Norm:
            return replace(old, weight=old.weight.cpu().float())

        weights = replace(self.weights, q_norm=norm(self.weights.q_norm), k_norm=norm(self.weights.k_norm))
        pool = self.kv_P2SGD.cpu()
        return Window(
            projected_NP=self.projected_NP.cpu().float(),
            weights=weights,
            rope=RopeTable(cos_LA=self.rope.cos_LA.cpu(), sin_LA=self.rope.sin_LA.cpu()),
            kv_P2SGD=pool if self.exponent_P2GS is not None else pool.float(),
            exponent_P2GS=None if self.exponent_P2GS is None else self.exponent_P2GS.cpu(),
            page_table_BP=self.page_table_BP.cpu(),
            start_B=self.start_B.cpu(),
        )


def random_window(
    config: TextConfig, users: int, context: int, columns: int, kv_dtype: str, device: torch.device, dtype: torch.dtype
) -> Window:
    """Page 0 is the scratch page."""
    rng = torch.Generator(device).manual_seed(users + context)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    pages = -(-(context + columns) // BLOCK_TOKENS)
    shape = (1 + users * pages, 2, BLOCK_TOKENS, kv_heads, head_dim)
    exponents = None
    if kv_dtype == "fp8":
        codes = torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 256, generator=rng)
        codes[codes & 0x7F == 0x7F] = 0  # the code of NaN
        pool = codes.view(FP8)
        exponents = torch.randint(
            *EXPONENTS, (shape[0], 2, kv_heads, BLOCK_TOKENS), generator=rng, dtype=torch.int8, device=device
        )
    else:
        pool = torch.empty(shape, dtype=dtype, device=device).normal_(generator=rng)
    norms = [
        Norm(weight=torch.randn(head_dim, generator=rng, device=device).mul(0.3).to(dtype), eps=1e-6) for _ in range(2)
    ]
    angles = torch.arange(context + columns, device=device)[:, None] * torch.rand(
        config.rotary_dim // 2, generator=rng, device=device
    )
    width = 2 * (heads + kv_heads) * head_dim
    return Window(
        projected_NP=torch.randn(users * columns, width, generator=rng, device=device).to(dtype),
        weights=AttentionWeights(
            q_norm=norms[0],
            k_norm=norms[1],
            scale=head_dim**-0.5,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        ),
        rope=RopeTable(cos_LA=angles.cos(), sin_LA=angles.sin()),
        kv_P2SGD=pool,
        exponent_P2GS=exponents,
        page_table_BP=torch.arange(1, shape[0], dtype=torch.int32, device=device).view(users, pages),
        start_B=torch.full((users,), context, device=device),
    )


def run(window: Window, *, by_reference: bool = False) -> Tensor:
    step = reference.attention_step if by_reference else attention_step
    return step(
        window.projected_NP,
        window.weights,
        window.rope,
        window.kv_P2SGD,
        window.page_table_BP,
        window.start_B,
        first_position=0,
        exponent_P2GS=window.exponent_P2GS,
    )


def error_of(config: TextConfig, columns: int, kv_dtype: str, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of the kernels against the reference, with two users."""
    window = random_window(config, 2, CHECKED_CONTEXT, columns, kv_dtype, device, dtype)
    want = run(window.to_float(), by_reference=True)
    return float((run(window).cpu().float() - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["4B", "27B", "35B-A3B"])
    parser.add_argument("--users", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[2_048, 100_000])
    parser.add_argument("--columns", nargs="+", type=int, default=[4])
    parser.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES, default=list(KV_DTYPES))
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    for model, columns, kv_dtype in itertools.product(options.models, options.columns, options.kv_dtype):
        error = error_of(CONFIGS[model], columns, kv_dtype, device, dtype)
        if error > TOLERANCE:
            sys.exit(f"{model}, {columns} columns, {kv_dtype}: relative error {error:.3f}")
    bytes_per_second = measure_bandwidth(device).read
    print(
        "| model | users | context | columns | pages | us | of the floor |\n|---|---|---|---|---|---|---|", flush=True
    )
    for model, users, context, columns, kv_dtype in itertools.product(
        options.models, options.users, options.context, options.columns, options.kv_dtype
    ):
        window = random_window(CONFIGS[model], users, context, columns, kv_dtype, device, dtype)
        floor = window.bytes_read / bytes_per_second
        seconds = seconds_a_launch(lambda _, window=window: run(window), floor)  # type: ignore[misc]
        what = f"{model} | {users} | {context:,} | {columns} | {kv_dtype}"
        print(f"| {what} | {seconds * 1e6:.1f} | {floor / seconds:.0%} |", flush=True)
        del window
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
