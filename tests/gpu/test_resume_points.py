"""Prompts of published shapes in bfloat16, whole and resumed from kept states: layer by layer against exact
arithmetic, end to end, and bitwise.

A prompt computed whole and one resumed from a checkpoint may differ in the order of sums only (docs/numerics.md,
"Prompts"): not at all if every call has the same shape, and never by more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from agentspec.models.hf_config import LayerType, TextConfig
from agentspec.models.protocol import VerifyBatch
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.prefill import run_batch
from agentspec.types import BLOCK_TOKENS, ZERO_ROW
from benchmarks.published import CONFIGS, spec_of
from tests.fakes.compare import TOLERANCE
from tests.fakes.forced_blocks import ForcedPrompts, Prompt, random_twins
from tests.fakes.prompt_run import Run, batch_of
from tests.fakes.sequence_driver import poison

pytestmark = pytest.mark.gpu
BLOCK_TOLERANCE = 2**-6
"""For a block in bfloat16, as in test_models_on_cuda.py."""
LOGIT_TOLERANCE = 2**-4
"""Between two runs of a whole model of 8 layers in bfloat16, relative to the largest logit. The effect of rounding is
measured beside it."""
MAX_RATIO = 1.25
"""Error of a resumed run divided by that of the whole one, both against float32: resuming adds no error."""

VOCAB_SIZE = 8192
LINEAR: LayerType = "linear_attention"
FULL: LayerType = "full_attention"


def cut(size: str, *layer_types: LayerType) -> TextConfig:
    return replace(CONFIGS[size], layer_types=layer_types, vocab_size=VOCAB_SIZE)


PROMPTS: dict[str, list[Prompt]] = {
    "from nothing": [Prompt(start=0, count=700, resume_at=(64, 448, 640))],
    "an append at a long context": [Prompt(start=20_032, count=890, resume_at=(20_096, 20_864))],
    "several": [
        Prompt(start=0, count=130, resume_at=(128,)),
        Prompt(start=70, count=1),
        Prompt(start=1024, count=333, resume_at=(1088, 1344)),
        Prompt(start=320, count=64),
        Prompt(start=5, count=200, resume_at=(192,)),
    ],
    "a chunk of a few blocks": [Prompt(start=4096, count=192, resume_at=(4160, 4224))],
}


@pytest.mark.parametrize(
    ("size", "prompts"),
    [*((size, prompts) for size in ("4B", "27B") for prompts in PROMPTS), ("0.8B", "several"), ("9B", "several")],
)
def test_published_shape_blocks_match_exact_arithmetic(size: str, prompts: str, cuda: torch.device) -> None:
    check_prompts(size, cut(size, LINEAR, FULL), PROMPTS[prompts], cuda, seed=len(prompts))


def check_prompts(size: str, config: TextConfig, prompts: Sequence[Prompt], device: torch.device, *, seed: int) -> None:
    twins = random_twins(config, spec_of(size, config, torch.bfloat16), device, torch.bfloat16)
    errors = ForcedPrompts(*twins, prompts=prompts, seed=seed).run()
    kinds: dict[str, float] = {}
    for name, error in errors.items():
        kind = name.rpartition(", ")[2]
        kinds[kind] = max(kinds.get(kind, 0.0), error)
    print(f"{size}: " + ", ".join(f"{kind} {error:.1e}" for kind, error in kinds.items()))
    assert any("resumed" in kind for kind in kinds)
    for name, error in errors.items():
        assert error < (TOLERANCE if name == "logits" else BLOCK_TOLERANCE), f"{size}: {name}: {error}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The results of a prefill of a sequence's tokens from `start` on."""

    start: int
    hidden_NH: Tensor
    rows: dict[int, int]
    """Row of the state after that many tokens."""
    pages: list[int]


class LongSequence:
    """A sequence in a model's pools, computed in parts. Each part has its own rows and pages, NaN before it runs."""

    def __init__(self, model: Qwen3_5Model, tokens: Sequence[int], *, num_parts: int, seed: int) -> None:
        """num_parts: number of prefills."""
        self.model = model
        self._tokens = list(tokens)
        self._num_pages = -(-len(tokens) // BLOCK_TOKENS) + 1
        num_rows, num_pages = num_parts * 24, num_parts * self._num_pages
        model.allocate(num_rows=2 + num_rows, num_pages=1 + num_pages)
        poison(model)
        generator = torch.Generator().manual_seed(seed)
        self._rows = (torch.randperm(num_rows, generator=generator) + 2).tolist()
        self._pages = (torch.randperm(num_pages, generator=generator) + 1).tolist()

    @torch.inference_mode()
    def prefill(self, ends: Sequence[int], *, keep: Sequence[int] = (), behind: tuple[Part, int] | None = None) -> Part:
        """Compute the tokens up to ends[-1] in chunks that end at `ends`.

        keep: lengths whose state is kept, besides those of `ends`. behind: resume from that part's state after so many
        tokens; None: from the start."""
        return self.prefill_together([(ends, keep, behind)])[0]

    @torch.inference_mode()
    def prefill_together(
        self, plans: Sequence[tuple[Sequence[int], Sequence[int], tuple[Part, int] | None]]
    ) -> list[Part]:
        """`prefill` of several sequences: the first chunks of all in one call, then the second ones, and so on."""
        parts, hiddens = [], [[] for _ in plans]  # type: ignore[var-annotated]
        for _, _, behind in plans:
            before = [] if behind is None else behind[0].pages[: behind[1] // BLOCK_TOKENS]
            pages = [*before, *(self._pages.pop() for _ in range(self._num_pages - len(before)))]
            start, row = (0, ZERO_ROW) if behind is None else (behind[1], behind[0].rows[behind[1]])
            parts.append(Part(start=start, hidden_NH=torch.empty(0), rows={start: row}, pages=pages))
        for number in range(max(len(ends) for ends, _, _ in plans)):
            runs, whose = [], []
            for place, (ends, keep, _) in enumerate(plans):
                if number < len(ends):
                    runs.append(self._run(parts[place], [parts[place].start, *ends][number], ends[number], keep))
                    whose.append(place)
            hidden_NH = run_batch(self.model, batch_of(runs, self.model.device), with_mtp=True)
            for place, some_NH in zip(whose, hidden_NH.split([len(run.token_ids) for run in runs]), strict=True):
                hiddens[place].append(some_NH)
        return [replace(part, hidden_NH=torch.cat(some)) for part, some in zip(parts, hiddens, strict=True)]

    def _run(self, part: Part, begin: int, end: int, keep: Sequence[int]) -> Run:
        wanted = sorted({*(length for length in keep if begin < length < end), end})
        read_row = part.rows[begin]
        part.rows.update((length, self._rows.pop()) for length in wanted)
        writes = tuple((length - begin, part.rows[length]) for length in wanted)
        return Run(
            token_ids=self._tokens[begin:end], start=begin, read_row=read_row, state_writes=writes, page_ids=part.pages
        )

    @torch.inference_mode()
    def verify(self, part: Part, length: int, num_columns: int) -> Tensor:
        """Return the hiddens of a decode window from the part's state after `length` tokens; stores its keys and
        values again."""
        device = self.model.device
        rows = [self._rows.pop() for _ in range(num_columns)]
        hidden_BTH = self.model.verify(
            VerifyBatch(
                tokens_BT=torch.tensor([self._tokens[length : length + num_columns]], device=device),
                length_B=torch.tensor([length], device=device),
                read_row_B=torch.tensor([part.rows[length]], device=device),
                write_rows_BT=torch.tensor([rows], device=device),
                page_table_BP=torch.tensor([part.pages], dtype=torch.int32, device=device),
            )
        )
        return hidden_BTH[0]

    def states(self, part: Part, length: int) -> dict[str, Tensor]:
        """Return the state after `length` tokens: the row and, from the part's start on, the pages."""
        pools, row, pages = self.model.pools, part.rows[length], part.pages[part.start // BLOCK_TOKENS :]
        kv_ANSGD = pools["kv_AP2SGD"][:, pages].transpose(2, 3).flatten(1, 2)[:, : length - part.start]
        return {
            "recurrent state": pools["ssm_LRVDK"][:, row],
            "convolution state": pools["conv_LR3C"][:, row],
            "hidden": pools.hidden_RH[row],
            "keys and values": kv_ANSGD[:-1],
            "keys and values of the MTP layer": kv_ANSGD[-1, 1 if part.start == 0 else 0 :],
        }


POINTS = (64, 320, 1024, 1600, 2048)
LENGTH = 2_100


def random_tokens(count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def rms_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def check_resume_points(
    size: str, config: TextConfig, points: Sequence[int], length: int, device: torch.device, *, seed: int
) -> None:
    """Compare the logits after every resume point, of a prefill and of a decode window, with the same prompt computed
    whole. A wrong state must exceed the tolerance."""
    model, exact_model = random_twins(config, spec_of(size, config, torch.bfloat16), device, torch.bfloat16)
    tokens = random_tokens(length, seed)
    exact_sequence = LongSequence(exact_model, tokens, num_parts=1, seed=seed)
    exact_NV = model_logits(exact_model, exact_sequence.prefill([length]).hidden_NH)
    sequence = LongSequence(model, tokens, num_parts=2 * len(points) + 2, seed=seed)
    whole = sequence.prefill([length], keep=points)
    whole_NV = model_logits(model, whole.hidden_NH)
    largest = float(exact_NV.abs().max())
    together = sequence.prefill_together([([length], (), (whole, at)) for at in points])
    for at, beside_others in zip(points, together, strict=True):
        alone = sequence.prefill([length], behind=(whole, at))
        window_NV = model_logits(model, sequence.verify(alone, at, 4))
        found = {
            "alone": (model_logits(model, alone.hidden_NH), slice(at, length)),
            "beside others": (model_logits(model, beside_others.hidden_NH), slice(at, length)),
            "a decode window": (window_NV, slice(at, at + 4)),
        }
        for how, (got_NV, some) in found.items():
            apart = float((got_NV - whole_NV[some]).abs().max()) / largest
            errors = rms_error(got_NV, exact_NV[some]), rms_error(whole_NV[some], exact_NV[some])
            text = f"{size}, resumed at {at}, {how}: {apart:.1e} from the whole run; errors {errors[0]:.2e}, "
            text += f"{errors[1]:.2e}"
            print(text)
            assert apart < LOGIT_TOLERANCE, text
            assert errors[0] < MAX_RATIO * errors[1], text
    wrong = sequence.prefill(
        [length], behind=(replace(whole, rows={**whole.rows, points[-1]: whole.rows[points[-2]]}), points[-1])
    )
    apart = float((model_logits(model, wrong.hidden_NH) - whole_NV[points[-1] :]).abs().max()) / largest
    assert apart > 2 * LOGIT_TOLERANCE, (
        f"a state of {points[-2]} tokens in place of one of {points[-1]} changes logits by only {apart:.1e}"
    )


def model_logits(model: Qwen3_5Model, hidden_NH: Tensor) -> Tensor:
    """Return the logits of the real tokens."""
    with torch.inference_mode():
        return model.logits(hidden_NH)[:, : model.spec.num_real_tokens]


@pytest.mark.parametrize("size", ["4B", "27B"])
def test_logits_after_every_resume_point_match_whole_run(size: str, cuda: torch.device) -> None:
    config = cut(size, *(LINEAR, LINEAR, LINEAR, FULL) * 2)
    check_resume_points(size, config, POINTS, LENGTH, cuda, seed=3)


def check_bits(model: Qwen3_5Model, ends: Sequence[int], *, seed: int) -> None:
    """Check that chunks of one shape give bitwise equal hiddens, states and pages, whether the tokens before were
    computed or resumed."""
    sequence = LongSequence(model, random_tokens(ends[-1], seed), num_parts=len(ends) + 1, seed=seed)
    whole = sequence.prefill(ends)
    for number, at in enumerate(ends[:-1]):
        rest = ends[number + 1 :]
        part = sequence.prefill(rest, behind=(whole, at))
        assert bits_of(part.hidden_NH).equal(bits_of(whole.hidden_NH[at:])), f"hiddens after {at}"
        for end in rest:
            got, expected = (
                sequence.states(part, end),
                sequence.states(replace(whole, start=at, pages=whole.pages), end),
            )
            for name in expected:
                assert not got[name].isnan().any(), f"{name} after {end} tokens, resumed at {at}"
                assert bits_of(got[name]).equal(bits_of(expected[name])), f"{name} after {end} tokens, resumed at {at}"


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_equal_chunks_are_bitwise_equal_computed_or_resumed(dtype: torch.dtype, cuda: torch.device) -> None:
    config = cut("4B", LINEAR, LINEAR, FULL)
    model, _ = random_twins(config, spec_of("4B", config, dtype), cuda, dtype)
    check_bits(model, (64, 320, 1024, 1088, 1600, 1700), seed=5)
