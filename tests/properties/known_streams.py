"""Checks whole streams with one prefill each, instead of generating them again token by token.

A stream is what its request emits alone if every token is the one that the model chooses after the tokens before it,
and if it ends where the request says. A from-scratch prefill of prompt and output has the logits after all of these
tokens: no cache, no drafts, no steps.

Shape letters: N tokens of prompt and output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.runtime.request import Request, new_request
from agentspec.types import FinishReason, ModelSpec
from tests.fakes.hash_chain import ReferenceRequest, SamplingTables
from tests.properties.real_model import Scratch, Turn

Stream = tuple[list[int], FinishReason | None, int | str | None]
"""Tokens, why they end, and the stop id that ended them."""

TURNS_EACH = 12
"""Turns in one pass."""


def expected_streams(scratch: Scratch, spec: ModelSpec, max_length: int, turns: Sequence[Turn]) -> list[Stream]:
    """What each turn emits alone. Behind a token that the model doesn't choose, or an end that comes too early, the
    right stream is unknown: it then has the right token there, and no reason to end."""
    streams = []
    for first in range(0, len(turns), TURNS_EACH):
        part = turns[first : first + TURNS_EACH]
        logits = scratch.logits_of([[*turn.submit.prompt_ids, *turn.emitted] for turn in part])
        for turn, logits_NV in zip(part, logits, strict=True):
            request = new_request(
                turn.submit, number=0, spec=spec, max_length=max_length, engine_seed=0, token_bytes=None
            )
            streams.append(_until_end(request, _chosen(request, turn.emitted, logits_NV), turn.emitted))
    return streams


def _chosen(request: Request, emitted: list[int], logits_NV: Tensor) -> list[int]:
    """The model's token after the prompt, and after the prompt with each part of what was emitted."""
    prompt, sampling = request.submit.prompt_ids, request.submit.sampling
    alone = ReferenceRequest(prompt=prompt, sampling=sampling, seed=request.seed, length_limit=request.length_limit)
    tables = SamplingTables([alone], logits_NV.shape[1])
    position_1T = torch.arange(len(prompt), len(logits_NV) + 1)[None]
    chosen_1T = tables.choose_after(
        torch.tensor([0]),
        logits_NV[None, len(prompt) - 1 :].cpu(),
        torch.tensor([emitted], dtype=torch.int64),
        position_1T,
    )
    found: list[int] = chosen_1T[0].tolist()
    return found


def _until_end(request: Request, chosen: list[int], emitted: list[int]) -> Stream:
    for count, token in enumerate(chosen, 1):
        if token in request.stop_ids:
            return chosen[:count], FinishReason.STOP, token
        if request.prompt_length + count == request.length_limit:
            return chosen[:count], FinishReason.LENGTH, None
        if emitted[count - 1 : count] != [token]:
            return chosen[:count], None, None
    raise AssertionError("one more token is chosen than was emitted")
