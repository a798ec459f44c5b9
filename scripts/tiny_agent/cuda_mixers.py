"""The two mixers over packed sequences on a GPU: flash attention of PyTorch and the gated delta rule of
flash-linear-attention (fla-core).

Import it only where there is a GPU with Triton."""

from __future__ import annotations

import inspect
from typing import Any

import fla.ops.common.chunk_delta_h as chunk_delta_h
import fla.ops.common.chunk_o as chunk_o
import fla.ops.gated_delta_rule.chunk_fwd as chunk_fwd
import fla.ops.gated_delta_rule.wy_fast as wy_fast
import fla.ops.utils.cumsum as cumsum
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from triton.runtime.autotuner import Autotuner

from scripts.tiny_agent.packing import Packed

_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
)
_HAS_SCALE = "scale" in inspect.signature(varlen_attn).parameters


def causal_attention(
    q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, packed: Packed, scale: float
) -> tuple[Tensor, Tensor]:
    """As in plain_mixers.py; bfloat16, as many key heads as query heads. The log-sum-exp has no gradient."""
    assert _HAS_SCALE or scale == q_TND.shape[-1] ** -0.5
    kwargs = {**_CAUSAL, **({"scale": scale} if _HAS_SCALE else {})}
    cu_seqlens, longest = packed.cu_seqlens, packed.max_length
    o_TND, lse = varlen_attn(
        q_TND, k_TND, v_TND, cu_seqlens, cu_seqlens, longest, longest, return_aux=AuxRequest(lse=True), **kwargs
    )
    return o_TND, (lse if lse.shape[0] == q_TND.shape[0] else lse.t()).detach()


def gated_delta(q_TVK: Tensor, k_TVK: Tensor, v_TVD: Tensor, g_TV: Tensor, beta_TV: Tensor, packed: Packed) -> Tensor:
    """As in plain_mixers.py; q, k and v bfloat16, g and beta float32."""
    o, _ = chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (q_TVK, k_TVK, v_TVD, g_TV, beta_TV)),
        cu_seqlens=packed.cu_seqlens_long,
        cu_seqlens_cpu=packed.cu_seqlens_cpu,
        chunk_indices=packed.chunks,
    )
    return o.squeeze(0)


def prepare_fla() -> None:
    """Make fla's backward right on Hopper with Triton 3.4 to 3.7.0, and its first call quick.

    There one kernel of the backward (dq, dk, dw, dg) is miscompiled for tiles of 64, our head size, and fla refuses to
    run it at all; tiles of 32 are right (fla issue 640). check_mixers.py compares with the plain version. The
    trying-out of configurations is cut to a few a kernel."""
    chunk_o.IS_NVIDIA_HOPPER = False
    chunk_o.check_shared_mem = lambda *_: False  # it then takes the smallest tiles
    for module in (chunk_delta_h, chunk_fwd, wy_fast, chunk_o, cumsum):
        for kernel in list(vars(module).values()):
            for tuner in (kernel, getattr(kernel, "fn", None)):
                if isinstance(tuner, Autotuner):
                    tuner.configs = _few(tuner.configs)


def _few(configs: list[Any]) -> list[Any]:
    stages = min(config.num_stages for config in configs)
    few = [config for config in configs if config.num_stages == stages and config.num_warps in (2, 4)]
    return few or configs
