"""Logits and MTP logits equal transformers' for dense, MoE and Next, however the tokens are split into calls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agentspec.models.qwen3_5 import Qwen3_5Model
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.hf_reference import Reference, load_transformers
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver


@pytest.mark.parametrize("sizes", [(), (64, 64), (1, 1, 1), (7, 63, 1, 65), (149,), (127, 2)], ids=str)
def test_chunked_prefill_matches_transformers(
    model: Qwen3_5Model, reference: Reference, prompt: list[int], sizes: tuple[int, ...]
) -> None:
    hidden = Driver(model).prefill(prompt, sizes)
    assert relative_error(model.logits(hidden), reference.logits) < TOLERANCE
    assert relative_error(hidden, reference.hidden) < TOLERANCE


def test_bfloat16_error_is_no_larger_than_transformers(
    checkpoint_root: Path, references: dict[str, Reference], prompt: list[int]
) -> None:
    """Mean errors of both, against float32. Dense only: in tiny mixtures a rounded router chooses other experts."""
    model = load_model(checkpoint_root / "dense", device=torch.device("cpu"), dtype=torch.bfloat16)
    driver, expected = Driver(model), references["dense"].logits
    hidden = driver.prefill(prompt[:146], (65,))
    hidden = torch.cat([hidden, driver.verify([prompt[146:]], [3])[0]])
    with torch.no_grad():
        theirs = (
            load_transformers(checkpoint_root / "dense", torch.bfloat16)(input_ids=torch.tensor([prompt]))
            .logits[0]
            .float()
        )
    assert (model.logits(hidden) - expected).abs().mean() < 1.2 * (theirs - expected).abs().mean()
    assert model.pools["ssm_LRVDK"].dtype == torch.float32


def test_single_token_steps_match_transformers(model: Qwen3_5Model, reference: Reference, prompt: list[int]) -> None:
    driver = Driver(model)
    hidden = [driver.prefill(prompt[:61])]
    hidden += [driver.verify([[token]], [0])[0] for token in prompt[61:90]]
    assert relative_error(model.logits(torch.cat(hidden)), reference.logits[:90]) < TOLERANCE


def test_window_from_zero_row_matches_transformers(
    model: Qwen3_5Model, reference: Reference, prompt: list[int]
) -> None:
    """A sequence can start with a window, without any prefill."""
    hidden = Driver(model).verify([prompt[:5]], [4])[0]
    assert relative_error(model.logits(hidden), reference.logits[:5]) < TOLERANCE


@pytest.mark.parametrize("num_drafted", [1, 3, 7])
def test_verify_resumes_from_the_last_accepted_column(
    model: Qwen3_5Model, reference: Reference, prompt: list[int], num_drafted: int
) -> None:
    """Rejected drafts don't change rows or pages, whichever column the next window resumes from."""
    rng = random.Random(num_drafted)
    driver, kept, length = Driver(model), [], 50
    kept.append(driver.prefill(prompt[:length]))
    for step in range(12):
        accepted = step % (num_drafted + 1)
        wrong = [(prompt[length + accepted + 1] + rng.randrange(1, 160)) % 160 for _ in range(num_drafted - accepted)]
        window = prompt[length : length + accepted + 1] + wrong
        kept.append(driver.verify([window], [accepted])[0, : accepted + 1])
        length += accepted + 1
    hidden = torch.cat(kept)
    assert relative_error(model.logits(hidden), reference.logits[:length]) < TOLERANCE


def test_slots_of_different_lengths_in_one_verify(model: Qwen3_5Model, reference: Reference, prompt: list[int]) -> None:
    driver = Driver(model, num_sequences=4)
    lengths = (1, 63, 64, 140)
    for which, length in enumerate(lengths):
        driver.prefill(prompt[:length], which=which)
    hidden_BTH = driver.verify([prompt[length : length + 4] for length in lengths], [3] * 4)
    for length, hidden in zip(lengths, hidden_BTH, strict=True):
        assert relative_error(model.logits(hidden), reference.logits[length : length + 4]) < TOLERANCE, length


def test_chunks_of_several_sequences_in_one_prefill(
    model: Qwen3_5Model, reference: Reference, prompt: list[int]
) -> None:
    driver = Driver(model, num_sequences=3)
    driver.prefill(prompt[:30], which=1)
    ends = (65, 77, 3)
    hidden = driver.prefill_together([prompt[s.length : end] for s, end in zip(driver.sequences, ends, strict=True)])
    for i, (first, end) in enumerate(zip((0, 30, 0), ends, strict=True)):
        assert relative_error(model.logits(hidden[i]), reference.logits[first:end]) < TOLERANCE, i


def test_checkpoints_inside_a_chunk_resume_exactly(
    model: Qwen3_5Model, reference: Reference, prompt: list[int]
) -> None:
    """Checkpoints written inside one chunk equal the states of prefills that end there."""
    driver = Driver(model)
    lengths = [1, 2, 63, 64, 100, 128]
    driver.prefill(prompt[:149], wanted=lengths)
    sequence = driver.sequences[0]
    for i, length in enumerate(lengths):
        sequence.read_row, sequence.length = sequence.rows[1 + i], length
        row_hidden = model.read_hidden(torch.tensor([sequence.read_row]))
        assert relative_error(row_hidden, reference.hidden[length - 1 : length]) < TOLERANCE, length
        saved = list(sequence.rows)
        sequence.rows = [sequence.rows[0], *sequence.rows[7:]]
        hidden = driver.verify([prompt[length : length + 2]], [0])[0]
        sequence.rows = saved
        assert relative_error(model.logits(hidden), reference.logits[length : length + 2]) < TOLERANCE, length


@pytest.mark.parametrize("sizes", [(), (64,), (1, 50)], ids=str)
def test_mtp_after_prefill_matches_transformers(
    model: Qwen3_5Model, reference: Reference, prompt: list[int], sizes: tuple[int, ...]
) -> None:
    driver = Driver(model)
    hidden = driver.prefill(prompt)
    driver.mtp_prefill(prompt[:100], hidden, sizes)
    m = driver.mtp(prompt[100:108], hidden[99:107], 100)
    assert relative_error(m, reference.mtp_hidden[99:107]) < TOLERANCE
    assert relative_error(model.logits(m), reference.mtp_logits[99:107]) < TOLERANCE
    assert torch.equal(model.draft_head(m), model.logits(m).argmax(-1))


def test_mtp_window_overwrites_rejected_drafts(model: Qwen3_5Model, reference: Reference, prompt: list[int]) -> None:
    driver = Driver(model)
    hidden = driver.prefill(prompt)
    driver.mtp(prompt[1:9], hidden[:8], 1)
    driver.mtp([3, 4, 5, 6], torch.randn(4, hidden.shape[1], generator=torch.Generator().manual_seed(0)), 9)
    m = driver.mtp(prompt[9:13], hidden[8:12], 9)
    assert relative_error(m, reference.mtp_hidden[8:12]) < TOLERANCE


@pytest.mark.parametrize("last", range(4))
def test_mtp_of_one_column_is_that_of_the_whole_window(
    model: Qwen3_5Model, reference: Reference, prompt: list[int], last: int
) -> None:
    driver = Driver(model)
    hidden = driver.prefill(prompt)
    driver.mtp_prefill(prompt[:100], hidden)
    m = driver.mtp(prompt[100:104], hidden[99:103], 100, last=last)
    assert relative_error(m, reference.mtp_hidden[99 + last : 100 + last]) < TOLERANCE
    after = driver.mtp(prompt[104:106], hidden[103:105], 104)  # reads the keys and values of all four
    assert relative_error(after, reference.mtp_hidden[103:105]) < TOLERANCE


def test_chained_mtp_equals_one_window(model: Qwen3_5Model, prompt: list[int]) -> None:
    """Drafting one token at a time equals one window over the same pairs."""
    driver = Driver(model)
    hidden = driver.prefill(prompt)
    driver.mtp_prefill(prompt[:20], hidden)
    m, pairs, tokens = hidden[19:20], [], prompt[20:24]
    for i, token in enumerate(tokens):
        pairs.append(m)
        m = driver.mtp([token], m, 20 + i)
    window = driver.mtp(tokens, torch.cat(pairs), 20)
    assert relative_error(window[-1:], m) < TOLERANCE
