"""Time gate and up of a prompt with SwiGLU, with weights in 16 bits: `python -m benchmarks.swiglu` on a Hopper GPU.

One launch (kernels/triton/swiglu_hopper.py) beside the matrix library and a launch for the SwiGLU, which are compared
with each other first. Four of a kind are captured in a graph and replayed for 50 ms at a time, kinds in random order:
products of this size are bound by the GPU's power, so what ran before counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec.kernels.triton.linear_layers import swiglu
from agentspec.kernels.triton.swiglu_hopper import is_faster, product
from benchmarks.published import CONFIGS

TOKENS = (800, 1024, 1600, 2048, 4096, 8192, 16384)
TOLERANCE = 6e-3
"""Relative, by norms: the library's gate and up are rounded to bfloat16."""
_IN_A_GRAPH = 4
_SECONDS = 0.05
_FLOPS = 600e12
"""Expected, a second."""


def captured(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_A_GRAPH):
            run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats // 3 + 1):
        graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed * 1e3 / repeats / _IN_A_GRAPH


def times(num_tokens: int, width: int, depth: int, rounds: int) -> dict[str, float]:
    """Median microseconds by kind."""
    x = torch.randn(num_tokens, depth, device="cuda").bfloat16()
    weight = (torch.randn(2 * width, depth, device="cuda") * depth**-0.5).bfloat16()
    runs = {
        "two launches": lambda: swiglu(linear(x, weight)),
        "one": lambda: product(x, weight),
        "product alone": lambda: linear(x, weight),
    }
    first, second = (runs[name]().double() for name in ("two launches", "one"))
    error = ((first - second).norm() / first.norm()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"{num_tokens} tokens, {width} x {depth}: results differ by {error}")
    graphs = {name: captured(run) for name, run in runs.items()}
    repeats = max(2, round(_SECONDS * _FLOPS / (4 * num_tokens * width * depth) / _IN_A_GRAPH))
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            seen[name].append(microseconds(graphs[name], repeats))
    return {name: statistics.median(values) for name, values in seen.items()}


def _width(model: str) -> int:
    """Outputs of gate; 0 of a mixture, whose experts have other kernels."""
    return CONFIGS[model].intermediate_size or 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Time gate and up of prompts with SwiGLU.")
    parser.add_argument(
        "--models", nargs="+", choices=[name for name in CONFIGS if _width(name)], default=["4B", "27B"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("needs a Hopper GPU, and torch sees none")
    random.seed(0)
    torch.manual_seed(0)
    print(
        "| model | tokens | two launches, us | one | product alone | one's TFLOPS | used |",
        "|---|" + "---|" * 6,
        sep="\n",
    )
    for model in options.models:
        width, depth = _width(model), CONFIGS[model].hidden_size
        for num_tokens in options.tokens:
            us = times(num_tokens, width, depth, options.rounds)
            used = "one" if is_faster(num_tokens, width, depth, torch.bfloat16, torch.device("cuda")) else "two"
            rate = 4e-6 * num_tokens * width * depth / us["one"]
            figures = " | ".join(f"{us[name]:.1f}" for name in ("two launches", "one", "product alone"))
            print(f"| {model} | {num_tokens} | {figures} | {rate:.0f} | {used} |", flush=True)


if __name__ == "__main__":
    main()
