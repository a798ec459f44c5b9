"""Training: its forward pass equals those of the engine and transformers on the exported checkpoint, the loss falls,
and runs resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.tiny_agent.architecture import initial_weights, parsed, text_config
from scripts.tiny_agent.checkpoint import published, write_checkpoint
from scripts.tiny_agent.losses import KIND_WEIGHTS, score, shifted_targets
from scripts.tiny_agent.model import Model
from scripts.tiny_agent.optimizer import learning_rate_factor
from scripts.tiny_agent.options import Options
from scripts.tiny_agent.packing import pack
from scripts.tiny_agent.render import Rendered
from scripts.tiny_agent.shards import MAX_SHARD_BYTES
from scripts.tiny_agent.teacher_forced import NUM_DRAFTS, evaluate
from scripts.tiny_agent.trainer import Trainer
from scripts.tiny_agent.training_state import Progress, load_state, save_state
from tests.fakes.compare import relative_error
from tests.fakes.hf_reference import load_transformers
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
TINY = text_config(192, num_layers=4, hidden=64, intermediate=96)
FULL = text_config(4096)
TOLERANCE = 1e-4


def random_weights(text: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A model of the published shape with non-trivial norms."""
    generator = torch.Generator().manual_seed(seed + 1)
    weights = initial_weights(parsed(text), seed)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        elif "embed_tokens" in name:
            weight *= 10
    return {name: published(name, weight).float() for name, weight in weights.items()}


def tokens_of(text: dict[str, Any], count: int, seed: int = 0) -> Tensor:
    return torch.randint(text["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def cumulated(*lengths: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.cumsum([0, *lengths]).astype(np.int32)


@pytest.mark.parametrize("text", [TINY, FULL], ids=["tiny", "full"])
def test_logits_equal_those_of_the_engine_and_transformers(text: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(text)
    write_checkpoint(tmp_path, weights, text, end_of_text_id=1, end_of_turn_id=2)
    tokens = tokens_of(text, 150)
    model = Model(parsed(text), weights, dtype=torch.float32)
    packed = pack(cumulated(150), CPU)
    hidden = model.hidden(tokens, packed)
    logits = model.logits(hidden)
    with torch.no_grad():
        theirs = load_transformers(tmp_path, torch.float32)(input_ids=tokens[None]).logits[0]
    assert relative_error(logits, theirs) < TOLERANCE
    engine = load_model(tmp_path, device=CPU, dtype=torch.float32)
    driver = Driver(engine)
    engine_hidden = driver.prefill(tokens.tolist())
    assert relative_error(logits, engine.logits(engine_hidden)) < TOLERANCE

    chain = model.drafts(tokens, hidden, packed, NUM_DRAFTS)
    root = 100
    driver.mtp_prefill(tokens.tolist()[: root + 1], engine_hidden)
    m_TH = engine_hidden[root : root + 1]
    for step in range(NUM_DRAFTS):
        m_TH = driver.mtp([int(tokens[root + 1 + step])], m_TH, root + 1 + step)
        assert relative_error(model.logits(chain[step][root]), engine.logits(m_TH[0])) < TOLERANCE, step


def test_shards_are_small_and_dtypes_are_the_published_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, random_weights(FULL), FULL, end_of_text_id=1, end_of_turn_id=2)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < MAX_SHARD_BYTES + 2**20 for file in files)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    in_float32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert in_float32 == {name for name in tensors if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert all(name.startswith(("model.", "mtp.")) for name in tensors)


def test_packed_sequences_do_not_affect_each_other() -> None:
    model = Model(parsed(TINY), random_weights(TINY), dtype=torch.float32)
    lengths = (5, 130, 1, 64, 77)
    sequences = [tokens_of(TINY, length, seed) for seed, length in enumerate(lengths)]
    packed = pack(cumulated(*lengths), CPU)
    hidden = model.hidden(torch.cat(sequences), packed)
    chain = model.drafts(torch.cat(sequences), hidden, packed, 3)
    begin = 0
    for tokens in sequences:
        end = begin + len(tokens)
        alone_packed = pack(cumulated(len(tokens)), CPU)
        alone = model.hidden(tokens, alone_packed)
        torch.testing.assert_close(hidden[begin:end], alone, rtol=1e-4, atol=1e-5)
        for step, m_TH in enumerate(model.drafts(tokens, alone, alone_packed, 3)):
            meant = len(tokens) - 1 - step  # beyond this, the chain reads tokens of the next sequence
            if meant > 0:
                torch.testing.assert_close(chain[step][begin : begin + meant], m_TH[:meant], rtol=1e-4, atol=1e-5)
        begin = end


def test_targets_stay_in_their_sequence() -> None:
    mask = torch.tensor([0, 1, 2, 2, 0, 2], dtype=torch.uint8)
    tokens = torch.arange(6)
    targets, weights = shifted_targets(tokens, mask, pack(cumulated(4, 2), CPU), 1)
    read, repeated, written = KIND_WEIGHTS
    assert targets[[0, 1, 2, 4]].tolist() == [1, 2, 3, 5]
    assert weights.tolist() == pytest.approx([repeated, written, written, 0, written, 0])
    assert shifted_targets(tokens, mask, pack(cumulated(4, 2), CPU), 2)[1].tolist() == pytest.approx(
        [written, written, 0, 0, 0, 0]
    )
    assert read < repeated < written


def test_loss_and_gradient_are_those_of_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(size, 16, generator=generator, requires_grad=True) for size in (40, 30))
    targets, weights = torch.randint(30, (40,), generator=generator), torch.rand(40, generator=generator)
    ours = score(hidden, head, targets, weights)
    (3 * ours.loss).backward()
    gradients = hidden.grad, head.grad
    hidden.grad = head.grad = None
    logits = hidden @ head.t()
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    plain = (nll * weights).sum() / weights.sum()
    (3 * plain).backward()
    torch.testing.assert_close(ours.loss, plain)
    torch.testing.assert_close(ours.nll_T, nll)
    assert torch.equal(ours.right_T, logits.argmax(-1) == targets)
    for ours_grad, plain_grad in zip(gradients, (hidden.grad, head.grad), strict=True):
        torch.testing.assert_close(ours_grad, plain_grad)


class Steps:
    """A trainer on the same short texts in every step."""

    lengths = (40, 60, 28)

    def __init__(self, options: Options, weights: dict[str, Tensor] | None = None) -> None:
        self.trainer = Trainer(parsed(TINY), weights or initial_weights(parsed(TINY), 0), CPU, options)
        self.steps = 0

    def run(self, count: int) -> list[float]:
        ids = np.concatenate([np.arange(length) * 7 % 50 for length in self.lengths]).astype(np.uint16)
        mask = np.concatenate([np.arange(length) * 3 // length for length in self.lengths]).astype(np.uint8)
        losses = []
        for _ in range(count):
            losses.append(self.trainer.step(ids, mask, cumulated(*self.lengths), 0.0, self.steps).item())
            self.steps += 1
        return losses


def test_steps_reduce_the_loss() -> None:
    steps = Steps(Options(warmup=1))
    losses = steps.run(40)
    assert losses[-1] < 0.2 * losses[0]
    assert "right" in str(steps.trainer.counts)


@pytest.mark.parametrize("trunk_gradient", [0.0, 0.5, 1.0])
def test_gradients_reach_every_weight(trunk_gradient: float) -> None:
    trainer = Steps(Options(mtp_trunk_gradient=trunk_gradient), random_weights(TINY)).trainer
    tokens, mask = tokens_of(TINY, 128), torch.full((128,), 2, dtype=torch.uint8)
    loss, _ = trainer._losses(tokens, mask, pack(cumulated(60, 68), CPU))
    loss.backward()
    assert [name for name, weight in trainer.weights.items() if weight.grad is None or not weight.grad.any()] == []


def test_detached_mtp_training_does_not_change_the_trunk() -> None:
    trainer = Steps(Options(mtp_factor=0.0)).trainer, Steps(Options(mtp_factor=5.0)).trainer
    tokens, mask = tokens_of(TINY, 64), torch.full((64,), 2, dtype=torch.uint8)
    for each in trainer:
        each._losses(tokens, mask, pack(cumulated(64), CPU))[0].backward()
    for name in trainer[0].weights:
        gradients = [each.weights[name].grad for each in trainer]
        assert gradients[0] is not None
        assert gradients[1] is not None
        if not name.startswith("mtp."):
            torch.testing.assert_close(gradients[0], gradients[1])


def test_the_chain_has_the_gradient_of_plain_attention() -> None:
    """The kernels' log-sum-exp has no gradient; the model compensates for it."""
    model = Model(
        parsed(TINY), {name: weight.double() for name, weight in random_weights(TINY).items()}, dtype=torch.float64
    )
    packed = pack(cumulated(9), CPU)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 4, 64, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, log_sum = model._attention_and_sum(q, k, v, packed)
    ours = torch.autograd.grad(log_sum.sin().sum(), (q, k))
    scores = torch.einsum("qnd,knd->nqk", q, k) * 64**-0.5
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    plain = torch.autograd.grad(scores.logsumexp(-1).sin().sum(), (q, k))
    for ours_grad, plain_grad in zip(ours, plain, strict=True):
        torch.testing.assert_close(ours_grad, plain_grad, rtol=1e-4, atol=1e-5)


def test_training_resumes_identically_after_a_save(tmp_path: Path) -> None:
    options = Options(warmup=3)
    whole = Steps(options)
    whole.run(3)
    state = tmp_path / "state"
    save_state(
        state,
        whole.trainer.weights,
        whole.trainer.optimizer.state(),
        Progress(0, TINY, step=3, steps_since_fresh_moments=3),
    )
    expected = whole.run(3)
    weights, moments, progress = load_state(state)
    assert moments is not None
    assert progress == Progress(0, TINY, step=3, steps_since_fresh_moments=3)
    resumed = Steps(options, weights)
    resumed.trainer.optimizer.load_state(moments)
    resumed.steps = 3
    assert resumed.run(3) == expected
    for name, weight in whole.trainer.weights.items():
        assert torch.equal(resumed.trainer.weights[name], weight), name


def test_a_state_without_moments_warms_up_again(tmp_path: Path) -> None:
    save_state(
        tmp_path / "state",
        random_weights(TINY),
        None,
        Progress(0, TINY, step=9, tokens=900, steps_since_fresh_moments=9),
    )
    _, moments, progress = load_state(tmp_path / "state")
    assert moments is None
    assert (progress.step, progress.tokens, progress.steps_since_fresh_moments) == (9, 900, 0)


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    def factor(progress: float, steps: int) -> float:
        return learning_rate_factor(progress, steps, warmup=10, decay=0.4)

    assert factor(0.0, 0) == pytest.approx(0.1)
    assert factor(0.3, 500) == 1.0
    assert factor(0.8, 900) == pytest.approx(0.5)
    assert factor(0.8, 0) == pytest.approx(0.05)
    assert factor(1.0, 999) == 0.0


def test_evaluation_counts_answers_and_drafts() -> None:
    """A model overfitted on one text predicts it, but not another text's answers."""
    steps = Steps(Options(warmup=1))
    steps.run(60)
    ids = (np.arange(60) * 7 % 50).astype(np.uint16)
    mask = np.array([0] * 20 + [2] * 10 + [0] * 10 + [2] * 20, dtype=np.uint8)
    model = steps.trainer.rounded_model()
    known = evaluate(model, [Rendered(ids, mask)] * 2, tokens_per_batch=64, max_length=60, device=CPU)
    assert known.num_messages == 4
    assert known.perfect_messages == known.right_tokens == 1.0
    assert known.accepted_drafts > 2
    assert len(known.draft_agreement) == NUM_DRAFTS
    wrong = ids.copy()
    wrong[45] = 49
    unknown = evaluate(model, [Rendered(wrong, mask)], tokens_per_batch=64, max_length=60, device=CPU)
    assert unknown.num_messages == 2
    assert unknown.perfect_messages == 0.5
    assert unknown.right_tokens < 1.0
