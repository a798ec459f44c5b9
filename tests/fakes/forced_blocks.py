"""Rounding errors in one block of a model: the block in 16 bits against the same block in float32, both on the same
inputs.

Inputs are forced: a block gets the exact result of the previous block, rounded once. So errors never add up over
layers, and a bound on them means the same for 4 layers as for 64. States, keys and values of earlier tokens are random.
The work is a decode window or a prefill.

Shape letters: as in models/protocol.py and kernels/__init__.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from agentspec import kernels
from agentspec.kernels import PrefillBatch, reference
from agentspec.models.attention import GatedAttention
from agentspec.models.hf_config import TextConfig
from agentspec.models.hybrid import DecoderLayer, MtpHead
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.protocol import VerifyBatch
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.state import Memory
from agentspec.models.tensors import random_parameters
from agentspec.types import BLOCK_TOKENS, ZERO_ROW, ModelSpec
from tests.fakes.compare import relative_error
from tests.fakes.prompt_run import Run, batch_of

STATE_SCALE = 0.05
"""Standard deviation of made-up recurrent states: what they read out is of the size of what a few written tokens do."""

SCORE_GAP = 0.25
"""Between the scores of chosen and other experts, whose standard deviation is about 1. Rounding a normed input to
bfloat16 moves them by some 0.001, and rounding themselves by up to 0.008."""


def random_twins(
    config: TextConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[Qwen3_5Model, Qwen3_5Model]:
    """(in `dtype` on the device's kernels, the same weights in float32 on reference kernels), both on the device.
    Block-scaled weights are converted to float32 exactly: quantisation errors are not rounding errors of the block."""
    parameters = random_parameters(config, device=device, dtype=dtype, seed=0)
    exact: dict[str, kernels.Weight] = {
        name: kernels.Plain(parameter.dequantize()) for name, parameter in parameters.items()
    }
    with patch.object(kernels, "backend", lambda _: reference):
        exact_model = Qwen3_5Model(config, spec, exact)
    return Qwen3_5Model(config, spec, parameters), exact_model


def kind_of(layer: DecoderLayer) -> str:
    return "attention" if isinstance(layer.mixer, GatedAttention) else "delta rule"


class ForcedBlocks(ABC):
    """Runs the same work in both twins, block by block. `errors` has each result's largest error by name, relative to
    the largest exact value; `spreads` the root mean square of its errors relative to that of the exact values."""

    def __init__(
        self,
        rounded: Qwen3_5Model,
        exact: Qwen3_5Model,
        *,
        num_tokens: int,
        num_rows: int,
        num_pages: int,
        generator: torch.Generator,
    ) -> None:
        """num_rows, num_pages: in addition to the reserved ones."""
        self.errors: dict[str, float] = {}
        self.spreads: dict[str, float] = {}
        self._twins = (rounded, exact)
        self._dtype = rounded._embedding_VH.dtype
        for model in self._twins:
            model.allocate(num_rows=2 + num_rows, num_pages=1 + num_pages)
        scales = (STATE_SCALE, 1.0, 1.0, 1.0)
        for ours, theirs, scale in zip(rounded.pools.tensors(), exact.pools.tensors(), scales, strict=True):
            ours.copy_(torch.randn(ours.shape, generator=generator) * scale)
            theirs.copy_(ours)
        self._tokens_N = torch.randint(rounded.spec.num_real_tokens, (num_tokens,), generator=generator)

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        rounded, exact = self._twins
        x_NH = embedding(self._tokens_N.to(rounded.device), rounded._embedding_VH)
        for i, layers in enumerate(zip(rounded._layers, exact._layers, strict=True)):
            x_NH = self._layer(f"layer {i}", i, layers, x_NH)
        norms = [model._norm for model in self._twins]
        hidden_NH = self._block("final norm", x_NH, lambda i, x: self._twins[i]._ops.rms_norm(x, norms[i]))
        self._block("logits", hidden_NH, lambda i, x: self._twins[i].logits(x)[:, : rounded.spec.num_real_tokens])
        if rounded._mtp is not None:
            heads = (rounded._mtp_head(), exact._mtp_head())
            embeddings = [model._embedding_VH for model in self._twins]
            x_NH = self._block(
                "MTP, join", hidden_NH, lambda i, x: heads[i].join(self._tokens_N.to(x.device), embeddings[i], x)
            )
            self._mtp_layer(heads, x_NH)
        return self.errors

    @abstractmethod
    def _mix(self, name: str, i: int, layer: DecoderLayer, memory: Memory, x_NH: Tensor) -> Tensor:
        """x plus the layer's mixer in twin i; 0 is the rounded one. name: the layer's, for recording intermediate
        errors."""

    @abstractmethod
    def _states(self, i: int, memory: Memory) -> dict[str, Tensor]:
        """What a mixer left in its memory in twin i, by name."""

    @abstractmethod
    def _mtp_layer(self, heads: tuple[MtpHead, MtpHead], x_NH: Tensor) -> None:
        """The part of the MTP layer that this work needs."""

    def _layer(self, name: str, place: int, layers: tuple[DecoderLayer, DecoderLayer], x_NH: Tensor) -> Tensor:
        """place: the layer's index; the MTP layer comes last."""
        kind = kind_of(layers[0])
        memories = [model.pools.layers[place] for model in self._twins]
        x_NH = self._block(f"{name}, {kind}", x_NH, lambda i, x: self._mix(name, i, layers[i], memories[i], x))
        self._compare_states(name, place)
        x_NH = self._with_scores_apart(layers[1], x_NH)
        return self._block(f"{name}, FFN", x_NH, lambda i, x: layers[i].ffn.add_to(x, layers[i].post_norm))

    def _with_scores_apart(self, layer: DecoderLayer, x_NH: Tensor) -> Tensor:
        """x, changed so that the router's scores of every token's chosen experts are at least SCORE_GAP above all
        others. If two scores are almost equal, rounding decides which expert is chosen, and another expert's output is
        not a rounding error. layer: of the exact twin."""
        if not isinstance(layer.ffn, MixtureOfExperts):
            return x_NH
        weights, norm = layer.ffn.weights, layer.post_norm
        exact_NH = x_NH.to(weights.router_XH.device, torch.float32)
        scores_NX = self._scores(layer, exact_NH)
        chosen_NX = torch.zeros_like(scores_NX).scatter_(1, scores_NX.topk(weights.top_k).indices, 1.0)
        # A score is the product of the normed x and a row of the router: this raises only the chosen experts' scores.
        towards_NH = chosen_NX @ torch.linalg.pinv(weights.router_XH).T / (1 + norm.weight)
        apart_NH = (exact_NH + SCORE_GAP * exact_NH.square().mean(-1, keepdim=True).sqrt() * towards_NH).to(
            x_NH.device, x_NH.dtype
        )
        best_NJ = self._scores(layer, apart_NH.to(exact_NH.device, torch.float32)).topk(weights.top_k + 1).values
        assert float((best_NJ[:, -2] - best_NJ[:, -1]).min()) > SCORE_GAP / 4
        return apart_NH

    def _scores(self, layer: DecoderLayer, x_NH: Tensor) -> Tensor:
        assert isinstance(layer.ffn, MixtureOfExperts)
        return linear(reference.rms_norm(x_NH, layer.post_norm), layer.ffn.weights.router_XH)

    def _compare_states(self, name: str, place: int) -> None:
        got, expected = (self._states(i, model.pools.layers[place]) for i, model in enumerate(self._twins))
        for kind in expected:
            self._compare(f"{name}, {kind}", got[kind], expected[kind])

    def _block(self, name: str, x_NH: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """compute(twin index, its input). Records the error and returns the exact result, rounded, on the first twin's
        device."""
        # A block may write its result over its input.
        got, exact = compute(0, x_NH.clone()), compute(1, x_NH.to(self._twins[1].device, torch.float32))
        self._compare(name, got, exact)
        return exact.to(x_NH.device, self._dtype)

    def _compare(self, name: str, got: Tensor, exact: Tensor) -> None:
        got = got.to(exact.device)
        self.errors[name] = relative_error(got, exact)
        self.spreads[name] = float((got - exact).norm() / exact.norm())


class ForcedWindows(ForcedBlocks):
    """One decode window."""

    def __init__(
        self, rounded: Qwen3_5Model, exact: Qwen3_5Model, *, starts: list[int], num_columns: int, seed: int
    ) -> None:
        """starts: position of column 0 of each slot."""
        num_slots, num_pages = len(starts), -(-(max(starts) + num_columns) // BLOCK_TOKENS)
        generator = torch.Generator().manual_seed(seed)
        rows_BR = torch.randperm(num_slots * (num_columns + 1), generator=generator).view(num_slots, -1) + 2
        pages_BP = (torch.randperm(num_slots * num_pages, generator=generator).view(num_slots, -1) + 1).to(torch.int32)
        super().__init__(
            rounded,
            exact,
            num_tokens=num_slots * num_columns,
            num_rows=rows_BR.numel(),
            num_pages=pages_BP.numel(),
            generator=generator,
        )
        self._write_rows_N = rows_BR[:, 1:].flatten()
        self._windows = [
            VerifyBatch(
                tokens_BT=self._tokens_N.view(num_slots, num_columns).to(model.device),
                length_B=torch.tensor(starts, device=model.device),
                read_row_B=rows_BR[:, 0].contiguous().to(model.device),
                write_rows_BT=rows_BR[:, 1:].contiguous().to(model.device),
                page_table_BP=pages_BP.to(model.device),
            )
            for model in self._twins
        ]
        assert ZERO_ROW not in rows_BR

    def _mix(self, name: str, i: int, layer: DecoderLayer, memory: Memory, x_NH: Tensor) -> Tensor:
        return layer.mix(
            x_NH,
            memory,
            lambda mixer, x_NH, norm, memory: mixer.step(mixer.project(x_NH, norm), memory, self._windows[i]),
        )

    def _states(self, i: int, memory: Memory) -> dict[str, Tensor]:
        if len(memory) == 1:
            return {"keys and values": memory[0]}
        return {"states": memory[0][self._write_rows_N.to(memory[0].device)]}

    def _mtp_layer(self, heads: tuple[MtpHead, MtpHead], x_NH: Tensor) -> None:
        x_NH = self._layer("MTP", -1, (heads[0].layer, heads[1].layer), x_NH)
        self._block("MTP, norm", x_NH, lambda i, x: self._twins[i]._ops.rms_norm(x, heads[i].norm))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A span of a prefill."""

    start: int
    """Position of its first token; what is before it is random."""
    count: int
    resume_at: tuple[int, ...] = ()
    """Positions inside it whose state is kept, and from which the rest is computed once more. Multiples of a block."""

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class _Resumed:
    """The rest of a prompt after a resume point."""

    run: Run
    tokens: slice
    """Those of the whole prefill that it computes again."""
    end_row: int
    """Where the whole prefill left the state after the prompt."""
    pages: list[int]
    """Where the whole prefill stored keys and values behind the point."""

    @property
    def end_row_again(self) -> int:
        return self.run.state_writes[-1][1]

    @property
    def fresh_pages(self) -> list[int]:
        return list(self.run.page_ids)[self.run.start // BLOCK_TOKENS :]


class ForcedPrompts(ForcedBlocks):
    """Prompts in one prefill; then, in the rounded twin only, the tokens after each resume point again, from the state
    that was kept there. Their keys and values go to separate pages, which hold NaN."""

    def __init__(self, rounded: Qwen3_5Model, exact: Qwen3_5Model, *, prompts: Sequence[Prompt], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        pages_each = [-(-prompt.end // BLOCK_TOKENS) for prompt in prompts]
        num_pages = sum(
            n + sum(n - at // BLOCK_TOKENS for at in prompt.resume_at)
            for prompt, n in zip(prompts, pages_each, strict=True)
        )
        num_rows = sum(2 + 2 * len(prompt.resume_at) for prompt in prompts)
        num_tokens = sum(prompt.count for prompt in prompts)
        super().__init__(
            rounded, exact, num_tokens=num_tokens, num_rows=num_rows, num_pages=num_pages, generator=generator
        )
        rows = iter((torch.randperm(num_rows, generator=generator) + 2).tolist())
        pages = iter((torch.randperm(num_pages, generator=generator) + 1).tolist())
        self._saved_rows: list[int] = []
        self._resumed: list[_Resumed] = []
        runs: list[Run] = []
        offset = 0
        for prompt, count in zip(prompts, pages_each, strict=True):
            tokens = slice(offset, offset + prompt.count)
            end_row, kept = next(rows), {at: next(rows) for at in prompt.resume_at}
            runs.append(
                Run(
                    token_ids=self._tokens_N[tokens].tolist(),
                    start=prompt.start,
                    read_row=next(rows) if prompt.start else ZERO_ROW,
                    state_writes=(*((at - prompt.start, row) for at, row in kept.items()), (prompt.count, end_row)),
                    page_ids=[next(pages) for _ in range(count)],
                )
            )
            self._saved_rows += [*kept.values(), end_row]
            self._resumed += [self._resume(runs[-1], at, row, tokens, next(rows), pages) for at, row in kept.items()]
            offset = tokens.stop
        fresh = [page for resumed in self._resumed for page in resumed.fresh_pages]
        rounded.pools["kv_AP2SGD"][:, fresh] = torch.nan
        self._batches = [batch_of(runs, model.device) for model in self._twins]
        self._pages = [page for run in runs for page in run.page_ids]

    @staticmethod
    def _resume(whole: Run, at: int, row: int, tokens: slice, end_row_again: int, pages: Iterator[int]) -> _Resumed:
        skipped, before = at - whole.start, at // BLOCK_TOKENS
        old_pages = list(whole.page_ids)
        run = Run(
            token_ids=whole.token_ids[skipped:],
            start=at,
            read_row=row,
            state_writes=((len(whole.token_ids) - skipped, end_row_again),),
            page_ids=[*old_pages[:before], *(next(pages) for _ in old_pages[before:])],
        )
        tokens = slice(tokens.start + skipped, tokens.stop)
        return _Resumed(run=run, tokens=tokens, end_row=whole.state_writes[-1][1], pages=old_pages[before:])

    def _mix(self, name: str, i: int, layer: DecoderLayer, memory: Memory, x_NH: Tensor) -> Tensor:
        out_NH = self._mix_batch(layer, memory, x_NH, self._batches[i])
        if i == 0:
            self._again = [
                self._mix_batch(layer, memory, x_NH[again.tokens], batch_of([again.run], x_NH.device))
                for again in self._resumed
            ]
            return out_NH
        kind = kind_of(layer)
        for number, (resumed, again_NH) in enumerate(zip(self._resumed, self._again, strict=True)):
            self._compare(f"{name} at resume point {number}, resumed {kind}", again_NH, out_NH[resumed.tokens])
        return out_NH

    @staticmethod
    def _mix_batch(layer: DecoderLayer, memory: Memory, x_NH: Tensor, batch: PrefillBatch) -> Tensor:
        return layer.mix(
            x_NH.clone(), memory, lambda mixer, x_NH, norm, memory: mixer.mix_prompt(x_NH, norm, memory, batch)
        )

    def _states(self, i: int, memory: Memory) -> dict[str, Tensor]:
        if len(memory) == 1:
            (kv_P2SGD,) = memory
            found = {"keys and values": kv_P2SGD[self._pages]}
            for number, resumed in enumerate(self._resumed):
                kv_NS2GD = kv_P2SGD[resumed.pages if i else resumed.fresh_pages].transpose(1, 2).flatten(0, 1)
                found[f"resume point {number}, resumed keys and values"] = kv_NS2GD[: len(resumed.run.token_ids)]
            return found
        end_rows = [resumed.end_row if i else resumed.end_row_again for resumed in self._resumed]
        ssm_RVDK, conv_R3C = memory
        found = {"states": ssm_RVDK[self._saved_rows], "convolution states": conv_R3C[self._saved_rows]}
        if end_rows:
            found |= {"resumed states": ssm_RVDK[end_rows], "resumed convolution states": conv_R3C[end_rows]}
        return found

    def _mtp_layer(self, heads: tuple[MtpHead, MtpHead], x_NH: Tensor) -> None:
        """A prompt needs only its keys and values."""
        for i, (model, head) in enumerate(zip(self._twins, heads, strict=True)):
            parts = [(x_NH, self._batches[i])]
            if i == 0:
                parts += [(x_NH[resumed.tokens], batch_of([resumed.run], model.device)) for resumed in self._resumed]
            for x, batch in parts:
                x = x.to(model.device, model._embedding_VH.dtype)
                head.attention.prefill_keys_values(x, head.layer.input_norm, model.pools.layers[-1], batch)
        self._compare_states("MTP", -1)
