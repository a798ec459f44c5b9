"""Muon for the hidden matrices, AdamW for everything else (embeddings, norms, convolutions, gates).

Muon's update is a matrix with all singular values near 1, so its size says nothing of the gradient's; it is scaled to
the root mean square that AdamW's updates have (0.2, arXiv 2502.16982), so one learning rate means about the same for
both. Matrices of one shape are orthogonalised together: a model this small spends its time on kernel launches
otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.1
_UPDATE_RMS = 0.2
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_MIN_MATRIX = 32
"""Matrices with a shorter side (the gates' projections) are AdamW's."""


class Optimizer:
    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights
        self._by_shape: dict[torch.Size, list[str]] = {}
        for name, weight in weights.items():
            if _is_hidden_matrix(name, weight):
                self._by_shape.setdefault(weight.shape, []).append(name)
        self._momentum = {name: torch.zeros_like(weights[name]) for names in self._by_shape.values() for name in names}
        self._others = [name for name in weights if name not in self._momentum]
        self._adamw = torch.optim.AdamW(
            [weights[name] for name in self._others],
            lr=0.0,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=weights[self._others[0]].is_cuda,
        )

    @torch.no_grad()
    def step(self, muon_lr: float, adamw_lr: float, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm` together, update, drop the gradients. Returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(list(self._weights.values()), max_norm)
        for names in self._by_shape.values():
            self._muon(names, muon_lr)
        self._adamw.param_groups[0]["lr"] = adamw_lr
        self._adamw.step()
        for weight in self._weights.values():
            weight.grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """The moments, by name."""
        moments = {f"momentum.{name}": tensor for name, tensor in self._momentum.items()}
        for name in self._others:
            moments |= {f"{key}.{name}": tensor for key, tensor in self._adamw.state[self._weights[name]].items()}
        return moments

    def load_state(self, moments: dict[str, Tensor]) -> None:
        """Go on from `state()`."""
        for name, tensor in self._momentum.items():
            tensor.copy_(moments[f"momentum.{name}"])
        for name in self._others:
            weight = self._weights[name]
            device = {"step": weight.device if weight.is_cuda else torch.device("cpu")}
            self._adamw.state[weight] = {
                key: moments[f"{key}.{name}"].to(device.get(key, weight.device)).clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
            }

    def _muon(self, names: list[str], lr: float) -> None:
        gradients = [gradient for name in names if (gradient := self._weights[name].grad) is not None]
        assert len(gradients) == len(names), "a weight without a gradient"
        momenta = [self._momentum[name] for name in names]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        updates = torch.stack(torch._foreach_lerp(gradients, momenta, _MOMENTUM))
        updates = _orthogonalized(updates)
        rows, columns = updates.shape[1:]
        weights = [self._weights[name] for name in names]
        torch._foreach_mul_(weights, 1 - lr * _WEIGHT_DECAY)
        torch._foreach_add_(
            weights, list(updates.to(weights[0].dtype).unbind()), alpha=-lr * _UPDATE_RMS * max(rows, columns) ** 0.5
        )


def learning_rate_factor(progress: float, steps_since_start: int, *, warmup: int, decay: float) -> float:
    """Constant, then linear to 0 over the last `decay` of the plan; after every start with fresh moments, `warmup`
    steps of linear rise."""
    return min(1.0, (steps_since_start + 1) / warmup) * min(1.0, max(0.0, 1.0 - progress) / decay)


def _is_hidden_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and min(weight.shape) >= _MIN_MATRIX and "embed_tokens" not in name


def _orthogonalized(matrices: Tensor) -> Tensor:
    """[B, rows, columns] with the singular values of each matrix brought near 1, by a quintic Newton-Schulz
    iteration."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
