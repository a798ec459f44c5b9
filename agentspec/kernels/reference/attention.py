"""Attention over paged keys and values, and the page stores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.reference.fp8_pages import dequantize_heads, quantize_heads
from agentspec.kernels.reference.spans import read_spans
from agentspec.kernels.traffic import touches_pools


@touches_pools
def write_kv(
    kv_P2SGD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    page_table_BP: Tensor,
    start_B: Tensor,
    exponent_P2GS: Tensor | None = None,
) -> None:
    """Store the keys and values of positions start..start+T-1 of every slot, in place.

    Args:
        kv_P2SGD: pool of one layer [P, 2, S, G, D]; exponent_P2GS: of its codes, where it is in FP8 (Backend); both
            are modified.
        k_BTGD: [B, T, G, D], after norm and RoPE. v_BTGD: raw values.
        page_table_BP: int32 [B, P], pages in block order. start_B: int64 [B].
    Does not read device data on the host. Slots that share a page (the scratch page) may overwrite each other there.
    """
    page_tokens = kv_P2SGD.shape[2]
    positions = start_B[:, None] + torch.arange(k_BTGD.shape[1], device=start_B.device)
    pages = page_table_BP.gather(1, positions // page_tokens).long()
    slots = positions % page_tokens
    _store(kv_P2SGD, exponent_P2GS, pages, slots, k_BTGD, v_BTGD)


@touches_pools
def write_kv_prefill(
    kv_P2SGD: Tensor, k_NGD: Tensor, v_NGD: Tensor, batch: PrefillBatch, exponent_P2GS: Tensor | None = None
) -> None:
    """`write_kv` for the spans of a prefill; k_NGD and v_NGD [N, G, D] are in the order of the batch."""
    page_tokens = kv_P2SGD.shape[2]
    for span in read_spans(batch):
        position_T = batch.position_N[span.tokens]
        pages, slots = span.page_ids_P[position_T // page_tokens].long(), position_T % page_tokens
        _store(kv_P2SGD, exponent_P2GS, pages, slots, k_NGD[span.tokens], v_NGD[span.tokens])


def _store(
    kv_P2SGD: Tensor, exponent_P2GS: Tensor | None, pages: Tensor, slots: Tensor, k_XGD: Tensor, v_XGD: Tensor
) -> None:
    """Store the heads of tokens at (page, slot), where the shape X is that of `pages` and `slots`."""
    for half, heads_XGD in enumerate((k_XGD, v_XGD)):
        if exponent_P2GS is None:
            kv_P2SGD[pages, half, slots] = heads_XGD
        else:
            kv_P2SGD[pages, half, slots], exponent_P2GS[pages, half, :, slots] = quantize_heads(heads_XGD)


@touches_pools
def paged_attention(
    q_BTQD: Tensor,
    kv_P2SGD: Tensor,
    page_table_BP: Tensor,
    start_B: Tensor,
    *,
    scale: float,
    first_position: int,
    exponent_P2GS: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries at positions start..start+T-1 over the keys at first_position..own position.

    Args:
        q_BTQD: [B, T, Q, D], after norm and RoPE. Query head j reads key/value head j // (Q / G).
        kv_P2SGD: pool of one layer [P, 2, S, G, D]; its positions below start+T are written already. exponent_P2GS: as
            in `write_kv`.
        page_table_BP: int32 [B, P], pages in block order. start_B: int64 [B].
        scale: multiplies the scores. first_position: earlier keys are never read (1 for the MTP layer).
    Returns: [B, T, Q, D] in q's dtype; zeros for a query with no key.

    The reference reads the starts on the host, to gather only the pages that a slot needs.
    """
    o_BTQD = torch.empty_like(q_BTQD)
    for slot, start in enumerate(start_B.tolist()):
        pool = kv_P2SGD, exponent_P2GS, page_table_BP[slot]
        o_BTQD[slot] = _attend(q_BTQD[slot], *pool, start, first_position, scale)
    return o_BTQD


@touches_pools
def paged_attention_prefill(
    q_NQD: Tensor, kv_P2SGD: Tensor, batch: PrefillBatch, *, scale: float, exponent_P2GS: Tensor | None = None
) -> Tensor:
    """`paged_attention` from position 0, for the spans of a prefill; q_NQD [N, Q, D] is in the order of the batch.

    Returns: [N, Q, D] in q's dtype."""
    o_NQD = torch.empty_like(q_NQD)
    for span in read_spans(batch):
        pool = kv_P2SGD, exponent_P2GS, span.page_ids_P
        o_NQD[span.tokens] = _attend(q_NQD[span.tokens], *pool, span.start, 0, scale)
    return o_NQD


def _attend(
    q_TQD: Tensor,
    kv_P2SGD: Tensor,
    exponent_P2GS: Tensor | None,
    page_ids_P: Tensor,
    start: int,
    first_position: int,
    scale: float,
) -> Tensor:
    """Attend with one sequence's queries over exactly its written positions: an unwritten position may hold NaN, so
    none is read."""
    num_tokens, num_heads, dim = q_TQD.shape
    _, _, page_tokens, num_groups, _ = kv_P2SGD.shape
    length = start + num_tokens
    pages = page_ids_P[: -(-length // page_tokens)]

    def written(pool_P2SG: Tensor, half: int) -> Tensor:
        return pool_P2SG[:, half].index_select(0, pages).flatten(0, 1)[first_position:length]

    k_NGD, v_NGD = (written(kv_P2SGD, half) for half in (0, 1))
    if exponent_P2GS is not None:
        k_NGD, v_NGD = (
            dequantize_heads(heads_NGD, written(exponent_P2GS.transpose(2, 3), half), q_TQD.dtype)
            for half, heads_NGD in enumerate((k_NGD, v_NGD))
        )
    positions = torch.arange(first_position, length, device=q_TQD.device)
    visible_TN = positions <= torch.arange(start, length, device=q_TQD.device)[:, None]
    # The query heads of a key/value head become rows of one product, so that keys and values are not repeated.
    shares = num_heads // num_groups
    q_GMD = q_TQD.view(num_tokens, num_groups, shares, dim).permute(1, 2, 0, 3).flatten(1, 2)
    o_GMD = scaled_dot_product_attention(
        q_GMD[None], k_NGD.transpose(0, 1)[None], v_NGD.transpose(0, 1)[None], visible_TN.repeat(shares, 1), scale=scale
    )[0]
    o_TQD = o_GMD.view(num_groups, shares, num_tokens, dim).permute(2, 0, 1, 3).flatten(1, 2)
    return o_TQD.where(visible_TN.any(-1)[:, None, None], 0)
