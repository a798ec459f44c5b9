"""Compares the GPU's mixers with the plain ones in float32, outputs and every gradient: python -m
scripts.tiny_agent.check_mixers

Triton and GPUs together have miscompiled such kernels before; training on wrong gradients fails quietly. Exits with 1
where they differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from scripts.tiny_agent import plain_mixers
from scripts.tiny_agent.packing import Packed, pack

LENGTHS = (1, 63, 64, 65, 700, 1500, 3, 1184, 512)
TOLERANCE = 0.03
_HEADS, _DIM = 4, 64


def worst_error(name: str) -> float:
    """The largest relative error of output and gradients of the mixer ("attention", "gated_delta") on a GPU; prints
    each."""
    from scripts.tiny_agent import cuda_mixers

    device = torch.device("cuda")
    packed = pack(np.cumsum([0, *LENGTHS]).astype(np.int32), device)
    inputs = _inputs(name, sum(LENGTHS), device)
    if name == "attention":
        results = [
            _run(lambda *x, m=module: m.causal_attention(*x, packed, _DIM**-0.5)[0], inputs)
            for module in (cuda_mixers, plain_mixers)
        ]
    else:
        results = [
            _run(lambda *x, m=module: m.gated_delta(*x, packed), inputs) for module in (cuda_mixers, plain_mixers)
        ]
    labels = ["output", *(f"d{x}" for x in ("q", "k", "v", "g", "beta")[: len(inputs)])]
    errors = {
        label: ((fast - plain).norm() / plain.norm()).item()
        for label, fast, plain in zip(labels, *results, strict=True)
    }
    print(f"{name}: " + ", ".join(f"{label} {error:.4f}" for label, error in errors.items()), flush=True)
    return max(errors.values(), key=lambda error: error if error == error else float("inf"))


def attention_sum_error() -> float:
    """The largest absolute error of the attention's log-sum-exp on a GPU."""
    from scripts.tiny_agent import cuda_mixers

    device = torch.device("cuda")
    packed = pack(np.cumsum([0, *LENGTHS]).astype(np.int32), device)
    q, k, v = _inputs("attention", sum(LENGTHS), device)
    sums = [module.causal_attention(q, k, v, packed, _DIM**-0.5)[1] for module in (cuda_mixers, plain_mixers)]
    error = (sums[0] - sums[1]).abs().max().item()
    print(f"attention: log-sum-exp {error:.4f}", flush=True)
    return error


def time_mixers(num_tokens: int) -> None:
    """Prints milliseconds forward and backward of one layer over a training batch."""
    from scripts.tiny_agent import cuda_mixers

    device = torch.device("cuda")
    lengths = [2048] * (num_tokens // 2048)
    packed: Packed = pack(np.cumsum([0, *lengths]).astype(np.int32), device)
    mixers: dict[str, Callable[..., Tensor]] = {
        "attention": lambda q, k, v: cuda_mixers.causal_attention(q, k, v, packed, _DIM**-0.5)[0],
        "gated_delta": partial(cuda_mixers.gated_delta, packed=packed),
        "gated_delta plain": partial(plain_mixers.gated_delta, packed=packed),
    }
    for name, mixer in mixers.items():
        inputs = _inputs(name.split()[0], num_tokens, device)
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            _run(mixer, inputs)
            torch.cuda.synchronize()
        print(f"{name}: {1000 * (time.perf_counter() - started):.2f} ms for {num_tokens} tokens", flush=True)


def _inputs(name: str, num_tokens: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, device=device, generator=generator)

    if name == "attention":
        return [normal(_HEADS, _DIM).bfloat16() for _ in range(3)]
    q, k = (normalize(normal(_HEADS, _DIM), dim=-1).bfloat16() for _ in range(2))
    return [q, k, normal(_HEADS, _DIM).bfloat16(), logsigmoid(normal(_HEADS) + 3), torch.sigmoid(normal(_HEADS))]


def _run(mixer: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = mixer(*leaves)
    weights = torch.randn(output.shape, device=output.device, generator=torch.Generator(output.device).manual_seed(1))
    (output.float() * weights).sum().backward()
    return [output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def main() -> None:
    from scripts.tiny_agent import cuda_mixers

    cuda_mixers.prepare_fla()
    started = time.perf_counter()
    is_right = [worst_error(name) < TOLERANCE for name in ("attention", "gated_delta")] + [
        attention_sum_error() < TOLERANCE
    ]
    print(f"first calls and checks: {time.perf_counter() - started:.0f} s", flush=True)
    time_mixers(131072)
    sys.exit(0 if all(is_right) else 1)


if __name__ == "__main__":
    main()
