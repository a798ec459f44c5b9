"""The floor of a prefill: its compulsory operations and bytes, and their minimum time on a device.

Each operation of each layer is counted separately, because it is bound by either arithmetic or memory:

    floor = sum over operations of max(useful FLOPs / matmul rate, compulsory bytes / read bandwidth)

For n new tokens behind a context of s, at two FLOPs a multiply-add:

- A projection of O x K: 2 n O K FLOPs; its weights, once. All projections of the trunk; of the MTP layer those of its
  keys and values. 8-bit weights count at the rate of 8-bit matmuls.
- Routed experts: the FLOPs of the J experts that each token visits; the weights of the expected number of distinct
  experts of n tokens with uniform choice, X (1 - (1 - J / X)^n): from 200 tokens on nearly all of X = 256.
- Attention: 4 Q D FLOPs for each pair of a new token and one that it sees, n s + n (n + 1) / 2 pairs; the keys and
  values of s + n tokens.
- The recurrence, counted token by token as it is defined (read out, update, read out): 6 V D K FLOPs a token; the
  state, read and written once. The additional arithmetic of chunked kernels isn't counted. The convolution before it:
  8 FLOPs a channel.
- The step of the first token: the head, and for each draft the MTP layer (with the routed experts of one token), its
  keys and values and the draft head. Only bytes.

Activations, norms, gates and embeddings aren't counted, because they can stay on the chip. The matmul rate and the
bandwidth are measured in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from agentspec.kernels import FP8
from agentspec.models.attention import attention_form
from agentspec.models.gated_delta import SSM_DTYPE
from agentspec.models.hf_config import TextConfig
from agentspec.models.state import page_bytes
from agentspec.models.tensors import parameter_shapes
from agentspec.types import BLOCK_TOKENS
from benchmarks.bandwidth import Bandwidth, measure_bandwidth
from benchmarks.step_bytes import ROUTED, Experts, names_in_fp8, parameter_bytes, step_bytes

Kind = Literal["linear", "experts", "attention", "recurrence", "mtp", "first step"]

MTP_ROW_WEIGHTS = ("mtp.fc.weight", "mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn.v_proj.weight")
"""Projections of the MTP head for all rows of a prompt. It has one layer, so its queries, output and FFN are needed for
the last row only."""

GPU_SIDE, CPU_SIDE = 8192, 256
"""Side of the square matrices of the timed matmul."""
BURST_ROUNDS = 12
SUSTAINED_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of the device."""

    matmul: float
    """FLOPs per second of a large bf16 matmul of normal values after more than a second of load, at sustained power and
    heat."""
    matmul_burst: float
    """The same in the first milliseconds after a pause."""
    bandwidth: Bandwidth
    matmul_fp8: float | None = None
    """Sustained rate of an 8-bit matmul with one scale per matrix and the fastest accumulation. None: not measured; 8
    bits count as 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    kind: Kind
    flops: float = 0.0
    num_bytes: float = 0.0
    fp8: bool = False
    """Whether its weights have 8 bits."""

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
    fp8_pages: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Operation]:
    """Operations of `count` prompt tokens from position `start`, until the first token. num_drafts: per step; 0: no MTP
    head. fp8_drafts, fp8_pages: see step_bytes."""
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
    key_bytes = page_bytes([attention_form(config, dtype, fp8=fp8_pages)]) // BLOCK_TOKENS
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
        fp8_pages=fp8_pages,
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
    """Measure the rates; also for 8 bits on a GPU that supports them."""
    matmul, burst = measure_matmul(device)
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    fp8 = measure_matmul(device, fp8=True)[0] if has_fp8 else None
    return Rates(matmul=matmul, matmul_burst=burst, matmul_fp8=fp8, bandwidth=measure_bandwidth(device))


def measure_matmul(
    device: torch.device, *, fp8: bool = False, side: int | None = None, seconds: float | None = None
) -> tuple[float, float]:
    """(sustained, burst) FLOPs per second of a square matmul of bf16, or of 8-bit floats with a bf16 result.

    side, seconds: None: as in Rates on a GPU, minimal on a CPU."""
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
        left_fp8, right_fp8 = left.to(FP8), right.to(FP8).t()  # the second matrix is column-major

        def multiply() -> None:
            torch._scaled_mm(
                left_fp8, right_fp8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

    def rate(rounds: int) -> float:
        return rounds * 2.0 * side**3 / seconds_for(multiply, rounds, device)

    rate(3)  # warm-up: the library chooses its kernel
    burst = rate(BURST_ROUNDS)
    rounds = max(1, int(seconds * burst / (2.0 * side**3)))
    rate(rounds // 2 + 1)
    return rate(rounds // 2 + 1), burst


def seconds_for(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Total time of all rounds, by the device's clock."""
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
