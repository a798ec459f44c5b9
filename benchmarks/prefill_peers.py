"""Compare a layer's attention and recurrence over one long prompt with kernels of other libraries.

Ours are whole operations of a layer: attention with head norms, RoPE, the stores into pages and the output gate; the
recurrence with convolution, gates and gated norm. The others get prepared queries, keys and values and compute only the
core: torch's attention over contiguous keys repeated for each query head, FlashInfer's over our pages, and
flash-linear-attention's chunked rule. Each result is compared with ours before it is timed. Libraries that can't be
imported are skipped; FlashInfer compiles its kernels first, which takes minutes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention, softplus

from agentspec import kernels
from agentspec.kernels.reference.causal_conv import causal_conv_prefill
from agentspec.kernels.reference.fused import split_heads
from agentspec.kernels.reference.norms import gated_rms_norm
from agentspec.models.gated_delta import SSM_DTYPE
from agentspec.models.hf_config import CONV_TAPS, TextConfig
from agentspec.models.layers import rope_table
from agentspec.runtime.prefill_tables import build_tables
from agentspec.types import BLOCK_TOKENS, ZERO_ROW
from benchmarks.bandwidth import median_seconds
from benchmarks.published import STATE_SCALE

SPANS = ((800, 50_048), (8_192, 0))
"""(new tokens, context) of the prompt."""
TOLERANCE = 2**-5
"""Relative tolerance of another library's result, by norms, in bfloat16."""
WORKSPACE_BYTES = 256 * 2**20
ROW = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A prompt of one sequence in pages 1, 2, ..., with the fields of prefill_tables.PromptRun; its state is in one
    row."""

    count: int
    start: int

    @property
    def token_ids(self) -> Sequence[int]:
        return [0] * self.count

    @property
    def read_row(self) -> int:
        return ROW if self.start else ZERO_ROW

    @property
    def state_writes(self) -> tuple[tuple[int, int], ...]:
        return ((self.count, ROW + 1),)

    @property
    def page_ids(self) -> Sequence[int]:
        return range(1, -(-(self.start + self.count) // BLOCK_TOKENS) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    what: str
    seconds: float = math.nan
    note: str = ""


@torch.inference_mode()
def compare_kernels(
    model: str, config: TextConfig, device: torch.device, *, spans: Sequence[tuple[int, int]] = SPANS
) -> str:
    """A table: microseconds a layer, and useful TFLOPS as prefill_floor counts them."""
    lines = [
        f"One layer of {model}, bfloat16:",
        "",
        "| operation | new tokens | context | by | us | TFLOPS |",
        "|---|---|---|---|---|---|",
    ]
    for count, start in spans:
        span = Span(count=count, start=start)
        pairs = count * start + count * (count + 1) / 2
        cells = config.num_value_heads * config.value_dim * config.key_dim
        for name, flops, compare in (
            ("attention", 4.0 * config.num_heads * config.head_dim * pairs, compare_attention),
            ("recurrence", count * (6.0 * cells + 8.0 * config.conv_channels), compare_recurrence),
        ):
            for timed in compare(config, span, device):
                figures = (
                    f"{timed.seconds * 1e6:.0f} | {flops / timed.seconds / 1e12:.0f}"
                    if not timed.note
                    else f"{timed.note} | –"
                )
                lines.append(f"| {name} | {count:,} | {start:,} | {timed.what} | {figures} |")
    return "\n".join(lines)


def compare_attention(config: TextConfig, span: Span, device: torch.device) -> list[Timed]:
    """Ours first."""
    ops, draw = kernels.backend(device), Draw(device)
    queries, keys, dim = config.num_heads, config.num_kv_heads, config.head_dim
    norm = kernels.Norm(weight=torch.zeros(dim, device=device, dtype=torch.bfloat16), eps=config.rms_norm_eps)
    weights = kernels.AttentionWeights(
        q_norm=norm, k_norm=norm, scale=dim**-0.5, num_heads=queries, num_kv_heads=keys, head_dim=dim
    )
    rope = rope_table(config, device)
    batch = build_tables([span], block_tokens=BLOCK_TOKENS).on(device).batch
    projected_NP = draw(span.count, 2 * (queries + keys) * dim)
    kv_P2SGD = draw(len(span.page_ids) + 1, 2, BLOCK_TOKENS, keys, dim)
    ours_ND = ops.attention_prefill(projected_NP, weights, rope, kv_P2SGD, batch)
    found = [
        Timed(
            what="agentspec",
            seconds=median_seconds(lambda: ops.attention_prefill(projected_NP, weights, rope, kv_P2SGD, batch), device),
        )
    ]

    q_NQD, gate_ND, _, _ = split_heads(
        projected_NP, weights, rope.cos_LA[batch.position_N], rope.sin_LA[batch.position_N]
    )
    length, q_NQD = span.start + span.count, q_NQD.contiguous()
    k_LGD, v_LGD = (kv_P2SGD[1:, half].flatten(0, 1)[:length] for half in (0, 1))
    q_1QND, k_1QLD, v_1QLD = (
        x.repeat_interleave(queries // x.shape[1], 1).transpose(0, 1)[None].contiguous() for x in (q_NQD, k_LGD, v_LGD)
    )
    mask = causal_lower_right(span.count, length)
    peers: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: (
            scaled_dot_product_attention(q_1QND, k_1QLD, v_1QLD, attn_mask=mask)[0].transpose(0, 1).flatten(1)
        )
    }
    for backend in ("fa2", "fa3"):
        attend = _flashinfer(backend, weights, span, q_NQD, kv_P2SGD)
        if attend is not None:
            peers[f"FlashInfer {backend}"] = attend
    gate_ND = torch.sigmoid(gate_ND)
    return found + [_timed(what, run, lambda o_ND: o_ND * gate_ND, ours_ND, device) for what, run in peers.items()]


def compare_recurrence(config: TextConfig, span: Span, device: torch.device) -> list[Timed]:
    """Ours first."""
    ops, draw = kernels.backend(device), Draw(device)
    heads, values, channels = config.num_value_heads, config.value_dim, config.conv_channels
    weights = kernels.DeltaWeights(
        conv_C4=draw(channels, CONV_TAPS) * 0.5,
        a_log_V=torch.full((heads,), 1.0, device=device),
        dt_bias_V=torch.full((heads,), -4.0, device=device),
        norm_D=torch.ones(values, device=device),
        eps=config.rms_norm_eps,
        gate=config.output_gate,
    )
    batch = build_tables([span], block_tokens=BLOCK_TOKENS).on(device).batch
    projected_NP = draw(span.count, channels + heads * values + 2 * heads)
    ssm_RVDK = draw(ROW + 2, heads, values, config.key_dim).to(SSM_DTYPE) * STATE_SCALE
    conv_R3C = draw(ROW + 2, CONV_TAPS - 1, channels)
    ssm_RVDK[ZERO_ROW], conv_R3C[ZERO_ROW] = 0, 0
    ours_ND = ops.gated_delta_prefill(projected_NP, weights, ssm_RVDK, conv_R3C, batch)
    assert isinstance(ours_ND, Tensor)
    found = [
        Timed(
            what="agentspec",
            seconds=median_seconds(
                lambda: ops.gated_delta_prefill(projected_NP, weights, ssm_RVDK, conv_R3C, batch), device
            ),
        )
    ]
    try:
        chunked = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        return found

    qkv, z, b, a = torch.split(projected_NP, [channels, heads * values, heads, heads], -1)
    qkv_NC = causal_conv_prefill(qkv, weights.conv_C4, conv_R3C, batch)
    q_NC, k_NC, v_NC = torch.split(qkv_NC, [config.num_key_heads * config.key_dim] * 2 + [heads * values], -1)
    parts = [
        torch.unflatten(part, -1, (-1, dim))
        for part, dim in ((q_NC, config.key_dim), (k_NC, config.key_dim), (v_NC, values))
    ]
    g_NV = -weights.a_log_V.exp() * softplus(a.float() + weights.dt_bias_V)
    tensors = [x[None].contiguous() for x in (*parts, g_NV, torch.sigmoid(b.float()))]
    state_1VKD = ssm_RVDK[span.read_row].transpose(1, 2)[None].contiguous()

    def run() -> Tensor:
        o_1NVD: Tensor = chunked(
            *tensors, initial_state=state_1VKD, output_final_state=True, use_qk_l2norm_in_kernel=True
        )[0]
        return o_1NVD[0]

    def gated(o_NVD: Tensor) -> Tensor:
        z_NVD = torch.unflatten(z, -1, (heads, values))
        return gated_rms_norm(o_NVD.float(), z_NVD, weights.norm_D, weights.eps, weights.gate).flatten(1)

    return [*found, _timed("flash-linear-attention", run, gated, ours_ND, device)]


class Draw:
    """Normal bfloat16 values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device, dtype=torch.bfloat16).normal_(generator=self._generator)


def _timed(
    what: str, run: Callable[[], Tensor], finish: Callable[[Tensor], Tensor], ours: Tensor, device: torch.device
) -> Timed:
    """Time one kernel. `finish` converts its result to the form of ours. An exception of another library is shown in
    its row of the table."""
    try:
        result = finish(run()).double()
        error = (torch.linalg.vector_norm(result - ours.double()) / torch.linalg.vector_norm(ours.double())).item()
        if not error <= TOLERANCE:
            return Timed(what=what, note=f"differs from ours by {error:.1e}")
        return Timed(what=what, seconds=median_seconds(run, device))
    except Exception as error:
        return Timed(what=what, note=f"{type(error).__name__}: {error}".partition("\n")[0][:120].replace("|", "/"))


def _flashinfer(
    backend: str, weights: kernels.AttentionWeights, span: Span, q_NQD: Tensor, kv_P2SGD: Tensor
) -> Callable[[], Tensor] | None:
    """Import a module; None if that fails."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError:
        return None
    device, pages = q_NQD.device, span.page_ids
    wrapper = None

    def run() -> Tensor:
        nonlocal wrapper
        if wrapper is None:  # compiles and plans on the host, which isn't timed
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
            wrapper.plan(
                torch.tensor([0, span.count], dtype=torch.int32),
                torch.tensor([0, len(pages)], dtype=torch.int32),
                torch.tensor(pages, dtype=torch.int32, device=device),
                torch.tensor([(span.start + span.count - 1) % BLOCK_TOKENS + 1], dtype=torch.int32),
                weights.num_heads,
                weights.num_kv_heads,
                weights.head_dim,
                BLOCK_TOKENS,
                causal=True,
                sm_scale=weights.scale,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
        o_NQD: Tensor = wrapper.run(q_NQD, kv_P2SGD)
        return o_NQD.flatten(1)

    return run
