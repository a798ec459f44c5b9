"""Counter-based random numbers: Philox4x32-10 in plain torch integer arithmetic, on any device.

Owns the generator and the mapping from (seed, position, token id, purpose) to a uniform. Knows nothing of sampling.

Formula: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The counter is (token id
// 4, position, purpose, 0), the key is the seed's low and high word, and the output word is token id % 4: one call
serves four adjacent tokens. So a draw depends only on its seed, position, token and purpose, not on the batch, the
step, or earlier draws.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

PURPOSE_TOKEN = 0
"""Gumbel noise of one candidate token at one position."""
PURPOSE_FORCED_ACCEPT = 1
"""Forced acceptance (benchmarks only) of the draft at one position."""

_ROUNDS = 10
_WORD = 0xFFFFFFFF


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers [2] of the lanes (c0, c2), and the key increments of each round [rounds, 2]. Cached, because a graph
    capture cannot upload them."""
    multipliers = torch.tensor([0xD2511F53, 0xCD9E8D57], dtype=torch.int64)
    weyl = torch.tensor([0x9E3779B9, 0xBB67AE85], dtype=torch.int64)
    bumps = torch.arange(_ROUNDS, dtype=torch.int64)[:, None] * weyl
    return multipliers.to(device), bumps.to(device)


def philox4x32(even: Tensor, odd: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds of Philox4x32 on int64 lanes.

    even: [2, ...] counter words 0 and 2; odd: [2, ...] counter words 1 and 3; key: [2, ...] key words 0 and 1; all in
    [0, 2**32). odd and key broadcast to the shape of even. Returns output words (0, 2) and (1, 3) in the same form.
    The odd lanes have undefined bits above bit 31: mask before use."""
    multipliers, bumps = _constants(key.device)
    ones = [1] * (key.dim() - 1)
    multipliers = multipliers.view(2, *ones)
    keys = (key + bumps.view(_ROUNDS, 2, *ones)) & _WORD
    for round_key in keys.unbind(0):
        # int64 products wrap modulo 2**64, so both halves of the 64-bit product have exact bits; only the sign is
        # meaningless.
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(_WORD)
        odd = product
    return even, odd


def uniform(seed: Tensor, position: Tensor, num_tokens: int, purpose: int) -> Tensor:
    """Uniforms in (0, 1) for token ids 0..num_tokens-1 at each position.

    seed, position: int64, same shape [...]; positions below 2**32. Returns float64 [..., num_tokens], each (u + 0.5) /
    2**24 with u of 24 bits. It is float64 because u + 0.5 needs 25 bits: in float32 the largest one would round to 1,
    and its Gumbel noise to infinity."""
    groups = (num_tokens + 3) // 4
    group = torch.arange(groups, device=seed.device).expand(*seed.shape, groups)
    position = position.unsqueeze(-1)
    seed = seed.unsqueeze(-1)
    even = torch.stack((group, torch.full_like(group, purpose)))
    odd = torch.stack((position, torch.zeros_like(position)))
    key = torch.stack((seed & _WORD, (seed >> 32) & _WORD))
    even, odd = philox4x32(even, odd, key)
    words = torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)
    bits = (words >> 8) & 0xFFFFFF
    return bits.flatten(-2)[..., :num_tokens].to(torch.float64).add_(0.5).mul_(2.0**-24)
