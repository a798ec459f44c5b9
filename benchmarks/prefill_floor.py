"""What a prompt can't be had without: the operations and bytes of its prefill, and the least time that they take on a
device.

Each operation of each layer is counted by itself, for it can be bound by arithmetic or by memory, but not by both at
once:

    floor = sum over operations of max(useful FLOPs / matmul rate, compulsory bytes / read bandwidth)

For n new tokens behind a context of s, at two FLOPs a multiply-add:

- A projection of O x K: 2 n O K FLOPs; its weights, once. In the trunk all of them; of the MTP layer those that its
  keys and values need. Where the weights are in 8 bits, at the rate of products in 8 bits.
- Routed experts: the FLOPs of the J experts that each token visits; the weights of as many different ones as n tokens
  visit on average if all are as likely, X (1 - (1 - J / X)^n): from 200 tokens on nearly all of X = 256.
- Attention: 4 Q D FLOPs for each pair of a new token and one that it sees, n s + n (n + 1) / 2 pairs; the keys and
  values of s + n tokens.
- The recurrence, counted token by token as it is defined (read out, update, read out): 6 V D K FLOPs a token; the
  state, read and written once. That a kernel for whole blocks does more arithmetic than that is its own affair. The
  convolution before it: 8 FLOPs a channel.
- The step that gives the first token: the head, and for each draft the MTP layer (of its routed experts those of one
  token), its keys and values and the draft head. Bytes alone.

Activations are left out, as are norms, gates and embeddings: what fits on the chip needn't leave it. The matmul rate
and the bandwidth are those measured in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from agentspec.kernels import FP8
from agentspec.models.gated_delta import SSM_DTYPE
from agentspec.models.hf_config import TextConfig
from agentspec.models.tensors import parameter_shapes
from benchmarks.bandwidth import Bandwidth, measure_bandwidth
from benchmarks.step_bytes import ROUTED, Experts, names_in_fp8, parameter_bytes, step_bytes

Kind = Literal["linear", "experts", "attention", "recurrence", "mtp", "first step"]

MTP_ROW_WEIGHTS = ("mtp.fc.weight", "mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn.v_proj.weight")
"""What a prompt's rows need of the MTP head. It has one layer, so its queries, output and FFN matter for the last row
alone."""

GPU_SIDE, CPU_SIDE = 8192, 256
"""Of the square matrices whose product is timed."""
BURST_ROUNDS = 12
SUSTAINED_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the device can do."""

    matmul: float
    """FLOPs a second of a large bf16 product of normal values, after a second and more of nothing else: power and heat
    have had their say."""
    matmul_burst: float
    """The same, in the first milliseconds after a pause."""
    bandwidth: Bandwidth
    matmul_fp8: float | None = None
    """Sustained, of a product in 8 bits with one multiplier a matrix and the fastest sums there are. None: not
    measured; 8 bits count as 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    kind: Kind
    flops: float = 0.0
    num_bytes: float = 0.0
    fp8: bool = False
    """Its weights are in 8 bits."""

    def arithmetic_seconds(self, rates: Rates) -> float:
        return self.flops / ((self.fp8 and rates.matmul_fp8) or rates.matmul)

    def seconds(self, rates: Rates) -> float:
        return max(self.arithmetic_seconds(rates), self.num_bytes / rates.bandwidth.read)


def operations(
    config: TextConfig,
    *,
    count: int,
    start: int,
    num_drafts: int,
    draft_vocab: int,
    fp8_drafts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Operation]:
    """Of `count` prompt tokens from position `start` on, up to the first token. num_drafts: of a step; 0: no MTP head.
    fp8_drafts: see step_bytes."""
    size = dtype.itemsize
    shapes = parameter_shapes(config)
    sizes = parameter_bytes(config, dtype, fp8_drafts=fp8_drafts)
    scaled = names_in_fp8(config, fp8_drafts=fp8_drafts)
    found = [
        Operation(kind="linear", flops=2.0 * count * math.prod(shape), num_bytes=sizes[name], fp8=name in scaled)
        for name, shape in shapes.items()
        if name.startswith("model.layers.") and len(shape) == 2
    ]
    if config.moe is not None:
        visited = config.moe.top_k / config.moe.num_experts
        touched = 1 - (1 - visited) ** count
        found += [
            Operation(
                kind="experts",
                flops=2.0 * count * visited * math.prod(shape),
                num_bytes=sizes[name] * touched,
                fp8=name in scaled,
            )
            for name, shape in shapes.items()
            if name.startswith("model.layers.") and ROUTED in name
        ]
    key_bytes = 2 * config.num_kv_heads * config.head_dim * size
    num_pairs = count * start + count * (count + 1) / 2
    attention = Operation(
        kind="attention",
        flops=4.0 * config.num_heads * config.head_dim * num_pairs,
        num_bytes=(start + count) * key_bytes,
    )
    cells = config.num_value_heads * config.value_dim * config.key_dim
    recurrence = Operation(
        kind="recurrence",
        flops=count * (6.0 * cells + 8.0 * config.conv_channels),
        num_bytes=2.0 * cells * SSM_DTYPE.itemsize,
    )
    found += [attention if layer_type == "full_attention" else recurrence for layer_type in config.layer_types]
    if num_drafts:
        found += [
            Operation(
                kind="mtp", flops=2.0 * count * math.prod(shapes[name]), num_bytes=sizes[name], fp8=name in scaled
            )
            for name in MTP_ROW_WEIGHTS
        ]
    step = step_bytes(
        config,
        batch=1,
        num_drafted=num_drafts,
        context=start + count,
        draft_vocab=draft_vocab,
        experts=None if config.moe is None else Experts(trunk=0.0, draft=config.moe.top_k),
        fp8_drafts=fp8_drafts,
        dtype=dtype,
    )
    draft_keys = num_drafts * (start + count) * key_bytes
    return [*found, Operation(kind="first step", num_bytes=step.head + step.mtp + step.draft_head + draft_keys)]


def seconds_of(ops: Iterable[Operation], rates: Rates) -> float:
    return sum(op.seconds(rates) for op in ops)


def arithmetic_seconds_of(ops: Iterable[Operation], rates: Rates) -> float:
    return sum(op.arithmetic_seconds(rates) for op in ops)


def flops_by_kind(ops: Iterable[Operation]) -> dict[str, float]:
    """Of the kinds that have any."""
    found: dict[str, float] = {}
    for op in ops:
        if op.flops:
            found[op.kind] = found.get(op.kind, 0.0) + op.flops
    return found


def measure_rates(device: torch.device) -> Rates:
    """On a GPU that multiplies in 8 bits, of that too."""
    matmul, burst = measure_matmul(device)
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    fp8 = measure_matmul(device, fp8=True)[0] if has_fp8 else None
    return Rates(matmul=matmul, matmul_burst=burst, matmul_fp8=fp8, bandwidth=measure_bandwidth(device))


def measure_matmul(
    device: torch.device, *, fp8: bool = False, side: int | None = None, seconds: float | None = None
) -> tuple[float, float]:
    """(sustained, burst) FLOPs a second of a square product of bf16, or of 8-bit floats into bf16.

    side, seconds: None: as Rates says on a GPU, next to nothing on a CPU."""
    on_gpu = device.type == "cuda"
    side = side or (GPU_SIDE if on_gpu else CPU_SIDE)
    seconds = seconds or (SUSTAINED_SECONDS if on_gpu else 0.01)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.empty(side, side, device=device, dtype=torch.bfloat16).normal_(generator=generator) for _ in range(2)
    )
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    if fp8:
        one = torch.ones((), device=device)
        left_fp8, right_fp8 = left.to(FP8), right.to(FP8).t()  # the second one by columns

        def multiply() -> None:
            torch._scaled_mm(
                left_fp8, right_fp8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

    def rate(rounds: int) -> float:
        return rounds * 2.0 * side**3 / seconds_for(multiply, rounds, device)

    rate(3)  # the library chooses its kernel
    burst = rate(BURST_ROUNDS)
    rounds = max(1, int(seconds * burst / (2.0 * side**3)))
    rate(rounds // 2 + 1)
    return rate(rounds // 2 + 1), burst


def seconds_for(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Of all rounds together, on the device's clock."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(rounds):
            run()
        return time.perf_counter() - began
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(rounds):
        run()
    after.record()
    after.synchronize()
    milliseconds: float = before.elapsed_time(after)
    return milliseconds / 1e3
