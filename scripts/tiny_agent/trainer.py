"""One training step: forward, losses of the trunk and of the MTP head, backward, update. Knows nothing of files or of
where batches come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.models.hf_config import TextConfig
from scripts.tiny_agent import blocks
from scripts.tiny_agent.checkpoint import published
from scripts.tiny_agent.losses import KIND_WEIGHTS, mtp_loss, score, shifted_targets
from scripts.tiny_agent.model import PLAIN, Kernels, Model, compiled
from scripts.tiny_agent.optimizer import Optimizer, learning_rate_factor
from scripts.tiny_agent.options import Options
from scripts.tiny_agent.packing import Packed, pack, to_device

IntArray = npt.NDArray[Any]

MTP_STEP_WEIGHTS = (1.0, 0.7, 0.5)
_MAX_NORM = 1.0


class Counts:
    """What steps report, summed on the device, so that no step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._nll_by_kind = torch.zeros(len(KIND_WEIGHTS), dtype=torch.float64, device=device)
        self._right_by_kind = torch.zeros_like(self._nll_by_kind)
        self._tokens_by_kind = torch.zeros_like(self._nll_by_kind)
        self._mtp = torch.zeros(len(MTP_STEP_WEIGHTS), dtype=torch.float64, device=device)
        self._norm = torch.zeros((), dtype=torch.float64, device=device)
        self._num_steps = 0

    def add(
        self, nll_T: Tensor, right_T: Tensor, kind_T: Tensor, counted_T: Tensor, mtp: list[Tensor], norm: Tensor
    ) -> None:
        is_kind_KT = (kind_T == torch.arange(len(KIND_WEIGHTS), device=kind_T.device)[:, None]) & counted_T
        self._tokens_by_kind += is_kind_KT.sum(1)
        self._right_by_kind += (is_kind_KT & right_T).sum(1)
        self._nll_by_kind += torch.where(is_kind_KT, nll_T, 0.0).sum(1)
        self._mtp += torch.stack(mtp).detach()
        self._norm += norm
        self._num_steps += 1

    def __str__(self) -> str:
        """Means; ends the count."""
        tokens = self._tokens_by_kind.clamp(min=1)
        read, repeated, written = (self._nll_by_kind / tokens).tolist()
        right = (self._right_by_kind / tokens)[-1].item()
        mtp = " ".join(f"{loss:.4f}" for loss in (self._mtp / self._num_steps).tolist())
        text = (
            f"written {written:.4f} ({right:.2%} right), repeated {repeated:.4f}, read {read:.3f}; mtp {mtp}; "
            f"norm {self._norm / self._num_steps:.2f}"
        )
        for total in (self._nll_by_kind, self._right_by_kind, self._tokens_by_kind, self._mtp, self._norm):
            total.zero_()
        self._num_steps = 0
        return text


class Trainer:
    """The model in training; `weights` become leaves that gradients flow to, on `device`."""

    def __init__(self, config: TextConfig, weights: dict[str, Tensor], device: torch.device, options: Options) -> None:
        self.options, self.device = options, device
        self.weights = {name: weight.to(device, torch.float32).requires_grad_() for name, weight in weights.items()}
        self.optimizer = Optimizer(self.weights)
        kernels = device_kernels(device, options.gated_delta)
        self._compile = options.compile and device.type == "cuda"
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        training_kernels = (
            Kernels(kernels.attention, kernels.gated_delta, compiled(blocks)) if self._compile else kernels
        )
        self._config, self._kernels = config, kernels
        self._model = Model(config, self.weights, dtype=self._dtype, kernels=training_kernels)
        self.counts = Counts(device)

    def rounded_model(self) -> Model:
        """The model as it will be published: weights rounded as export.py does. Not for training."""
        rounded = {name: published(name, weight.detach()).float() for name, weight in self.weights.items()}
        return Model(self._config, rounded, dtype=self._dtype, kernels=self._kernels)

    def step(
        self, ids: IntArray, mask: IntArray, cu_seqlens: IntArray, progress: float, steps_since_start: int
    ) -> Tensor:
        """Train on one batch (data.py's arrays); `progress` is the share of the plan that is done. Returns the loss."""
        tokens_T, mask_T = to_device(ids.astype(np.int64), self.device), to_device(mask, self.device)
        loss, seen = self._losses(tokens_T, mask_T, pack(cu_seqlens, self.device))
        loss.backward()
        options = self.options
        factor = learning_rate_factor(progress, steps_since_start, warmup=options.warmup, decay=options.decay)
        norm = self.optimizer.step(options.muon_lr * factor, options.adamw_lr * factor, _MAX_NORM)
        self.counts.add(*seen, norm)
        return loss.detach()

    def _losses(
        self, tokens_T: Tensor, mask_T: Tensor, packed: Packed
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]]:
        model, options = self._model, self.options
        hidden_TH = model.hidden(tokens_T, packed)
        main = score(hidden_TH, model.head, *shifted_targets(tokens_T, mask_T, packed, 1), compile_terms=self._compile)
        head_VH = _scaled_gradient(model.head, options.mtp_trunk_gradient)
        chain = model.drafts(
            tokens_T, _scaled_gradient(hidden_TH, options.mtp_trunk_gradient), packed, len(MTP_STEP_WEIGHTS), head_VH
        )
        mtp = [
            score(m_TH, head_VH, *shifted_targets(tokens_T, mask_T, packed, 2 + step), compile_terms=self._compile).loss
            for step, m_TH in enumerate(chain)
        ]
        loss = main.loss + options.mtp_factor * mtp_loss(mtp, MTP_STEP_WEIGHTS)
        return loss, (main.nll_T, main.right_T, mask_T.roll(-1), packed.has_next(1), [part.detach() for part in mtp])


def device_kernels(device: torch.device, gated_delta: str) -> Kernels:
    """The fastest kernels of the device, with blocks not compiled."""
    if device.type != "cuda":
        return PLAIN
    from scripts.tiny_agent import cuda_mixers

    cuda_mixers.prepare_fla()
    return Kernels(
        cuda_mixers.causal_attention, cuda_mixers.gated_delta if gated_delta == "fla" else PLAIN.gated_delta, blocks
    )


def _scaled_gradient(x: Tensor, scale: float) -> Tensor:
    return x.detach() if scale == 0 else x * scale + x.detach() * (1 - scale)
