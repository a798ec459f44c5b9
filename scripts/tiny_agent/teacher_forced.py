"""Teacher-forced accuracy of the model on the gold answers of held-out sessions, and of its MTP head's drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scripts.tiny_agent.model import Model
from scripts.tiny_agent.packing import Packed, pack
from scripts.tiny_agent.render import WRITTEN, Rendered

NUM_DRAFTS = 5


@dataclass(frozen=True, slots=True)
class Results:
    num_messages: int
    perfect_messages: float
    """Share of answers (runs of written tokens) whose every token is the most likely one, given the gold tokens before
    it."""
    right_tokens: float
    """Share of written tokens that are the most likely ones."""
    draft_agreement: list[float]
    """By position in the chain: share of drafts for written tokens that are the trunk's choice, given the gold tokens
    before."""
    accepted_drafts: float
    """Mean number of accepted drafts, out of NUM_DRAFTS."""

    def __str__(self) -> str:
        by_position = " ".join(f"{share:.1%}" for share in self.draft_agreement)
        return (
            f"{self.perfect_messages:.2%} of {self.num_messages} answers perfect, {self.right_tokens:.3%} of tokens "
            f"right; "
            f"mtp agrees {by_position}, accepted {self.accepted_drafts:.2f} of {NUM_DRAFTS}"
        )


@torch.no_grad()
def evaluate(
    model: Model, sessions: Sequence[Rendered], *, tokens_per_batch: int, max_length: int, device: torch.device
) -> Results:
    """Over all sessions, each cut at `max_length`."""
    messages: list[Tensor] = []
    tokens: list[Tensor] = []
    agreements: list[Tensor] = []
    for ids, mask, packed in _batches(sessions, tokens_per_batch, max_length, device):
        hidden_TH = model.hidden(ids, packed)
        choices_T = _choices(model, hidden_TH)
        is_written = (mask.roll(-1) == WRITTEN) & packed.has_next(1)
        is_right = choices_T == ids.roll(-1)
        tokens.append(is_right[is_written])
        messages.append(_all_right(is_right, is_written))
        drafts = [_choices(model, m_TH) for m_TH in model.drafts(ids, hidden_TH, packed, NUM_DRAFTS)]
        agrees = torch.stack([draft == choices_T.roll(-1 - step) for step, draft in enumerate(drafts)])
        # Only chains in which every draft is for a written token: tokens after an answer's end aren't drafted when
        # the model runs.
        inside = torch.stack(
            [(mask.roll(-2 - step) == WRITTEN) & packed.has_next(2 + step) for step in range(NUM_DRAFTS)]
        ).all(0)
        agreements.append(agrees[:, inside])
    all_agreements = torch.cat(agreements, 1).float()
    all_messages = torch.cat(messages)
    return Results(
        num_messages=len(all_messages),
        perfect_messages=all_messages.float().mean().item(),
        right_tokens=torch.cat(tokens).float().mean().item(),
        draft_agreement=all_agreements.mean(1).tolist(),
        accepted_drafts=all_agreements.cumprod(0).sum(0).mean().item(),
    )


def _choices(model: Model, hidden_TH: Tensor) -> Tensor:
    return torch.cat([model.logits(part).argmax(-1) for part in hidden_TH.split(16384)])


def _all_right(is_right_T: Tensor, is_written_T: Tensor) -> Tensor:
    """bool [messages]: by maximal run of written tokens."""
    begins = is_written_T & ~is_written_T.roll(1)
    begins[0] = is_written_T[0]
    run_of = (begins.long().cumsum(0) - 1)[is_written_T]
    num_wrong = torch.zeros(int(begins.sum()), dtype=torch.long, device=is_right_T.device)
    return num_wrong.index_add(0, run_of, (~is_right_T[is_written_T]).long()) == 0


def _batches(
    sessions: Sequence[Rendered], tokens_per_batch: int, max_length: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Packed]]:
    held: list[Rendered] = []
    for session in [*sessions, None]:
        if held and (session is None or sum(len(s.ids[:max_length]) for s in [*held, session]) > tokens_per_batch):
            ids = torch.from_numpy(np.concatenate([s.ids[:max_length] for s in held]).astype(np.int64)).to(device)
            mask = torch.from_numpy(np.concatenate([s.mask[:max_length] for s in held])).to(device)
            lengths = [len(s.ids[:max_length]) for s in held]
            yield ids, mask, pack(np.cumsum([0, *lengths]).astype(np.int32), device)
            held = []
        if session is not None:
            held.append(session)
