"""The reference sampling against an independent slow version, and its edge cases."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import torch
from torch import Tensor

from agentspec.kernels.reference.sampling import (
    DrawInputs,
    PenaltyInputs,
    apply_mask,
    draw,
    gumbel_noise,
    keep_threshold,
    penalise,
)

VOCAB = 37


def draw_inputs(
    *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> DrawInputs:
    return DrawInputs(
        temperature_B=torch.tensor([temperature]),
        top_k_B=torch.tensor([top_k or VOCAB]),
        top_p_B=torch.tensor([top_p if top_p < 1 else math.inf]),
        log_min_p_B=torch.tensor([math.log(min_p) if min_p else -math.inf]),
        seed_B=torch.tensor([seed]),
    )


def slow_kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], float]:
    """Return the tokens that survive the filters, applied one after the other, and the distance to the closest top-p
    decision."""
    tempered = [x / temperature for x in logits]
    best = max(tempered)
    probs = [math.exp(x - best) for x in tempered]
    kept = {i for i, p in enumerate(probs) if p >= min_p}
    if top_k:
        nth = sorted((tempered[i] for i in kept), reverse=True)[:top_k][-1]
        kept = {i for i in kept if tempered[i] >= nth}
    margin = math.inf
    if top_p < 1:
        total = sum(probs[i] for i in kept)
        mass, survivors = 0.0, set()
        for value in sorted({tempered[i] for i in kept}, reverse=True):
            tied = {i for i in kept if tempered[i] == value}
            margin = min(margin, abs(mass - top_p))
            if mass >= top_p:
                break
            survivors |= tied
            mass += sum(probs[i] for i in tied) / total
        kept = survivors
    return kept, margin


def random_logits(generator: random.Random) -> list[float]:
    """Random logits with some ties, so that tie rules are exercised."""
    return [round(generator.gauss(0, 2), generator.choice([0, 3])) for _ in range(VOCAB)]


def test_filters_match_slow_reference_in_every_combination() -> None:
    generator = random.Random(11)
    combinations = itertools.product((0.3, 1.0, 2.5), (0, 1, 2, 10, VOCAB), (1.0, 0.999, 0.7, 0.05), (0.0, 0.02, 0.4))
    compared = 0
    for case, (temperature, top_k, top_p, min_p) in enumerate(combinations):
        for _ in range(4):
            logits = random_logits(generator)
            kept, margin = slow_kept(logits, temperature, top_k, top_p, min_p)
            if margin < 1e-5:
                continue  # float32 and float64 may differ here
            tempered = torch.tensor([[logits]]) / temperature
            threshold = keep_threshold(
                tempered, draw_inputs(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            )
            got = set((tempered >= threshold)[0, 0].nonzero().flatten().tolist())
            assert got == kept, f"case {case}: {temperature=} {top_k=} {top_p=} {min_p=} {logits=}"
            compared += 1
    assert compared > 600


def test_draw_is_argmax_of_noisy_logits_among_kept_tokens() -> None:
    generator = random.Random(12)
    for case in range(300):
        logits = random_logits(generator)
        temperature = generator.choice([0.4, 1.0, 3.0])
        top_k, top_p, min_p = generator.choice([0, 3, 12]), generator.choice([1.0, 0.8]), generator.choice([0.0, 0.1])
        kept, margin = slow_kept(logits, temperature, top_k, top_p, min_p)
        if margin < 1e-5:
            continue
        seed, position = generator.getrandbits(63), generator.randrange(10_000)
        noise = gumbel_noise(torch.tensor([[seed]]), torch.tensor([[position]]), VOCAB)[0, 0].tolist()
        expected = max(kept, key=lambda i: logits[i] / temperature + noise[i])
        inputs = draw_inputs(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        got = draw(torch.tensor([[logits]]), torch.tensor([[position]]), inputs).item()
        assert got == expected, f"case {case}: {temperature=} {top_k=} {top_p=} {min_p=} {seed=} {position=}"


def test_temperature_0_is_argmax_with_lowest_id_on_ties() -> None:
    logits = torch.zeros(1, 2, VOCAB)
    logits[0, 0, [9, 4, 30]] = 5.0
    logits[0, 1, [36, 35]] = 1.0
    chosen = draw(logits, torch.tensor([[1, 2]]), draw_inputs(temperature=0.0, top_k=3, top_p=0.2, min_p=0.5))
    assert chosen.tolist() == [[4, 35]]
    assert logits.argmax(-1).tolist() == [[4, 35]]


def test_greedy_requests_draw_the_same_beside_a_sampled_one() -> None:
    """Alone they are drawn without sort and noise. The filters of a greedy request change nothing."""
    generator = random.Random(12)
    for _ in range(50):
        logits_BTV = torch.tensor([[random_logits(generator) for _ in range(3)] for _ in range(4)])
        logits_BTV[generator.randrange(4), generator.randrange(3), generator.randrange(VOCAB) :] = -torch.inf
        inputs = DrawInputs(
            temperature_B=torch.tensor([0.0, 0.0, 0.0, 1.0]),
            top_k_B=torch.tensor([generator.randint(1, VOCAB) for _ in range(4)]),
            top_p_B=torch.tensor([generator.choice([0.5, math.inf]) for _ in range(4)]),
            log_min_p_B=torch.tensor([generator.choice([-1.0, -math.inf]) for _ in range(4)]),
            seed_B=torch.arange(4),
        )
        greedy = DrawInputs(**{field.name: getattr(inputs, field.name)[:3] for field in dataclasses.fields(inputs)})
        position_BT = torch.arange(12).view(4, 3)
        alone_BT = draw(logits_BTV[:3], position_BT[:3], greedy)
        assert alone_BT.tolist() == draw(logits_BTV, position_BT, inputs)[:3].tolist()


def test_disabled_filters_keep_every_token() -> None:
    """With top_p 1, the rounding of a cumulative sum must not cut unlikely tokens."""
    logits = torch.full((1, 1, VOCAB), -40.0)
    logits[..., 0] = 0.0
    assert (logits >= keep_threshold(logits, draw_inputs())).all()


def test_padding_token_is_never_drawn() -> None:
    logits = torch.zeros(1, 400, VOCAB)
    logits[..., 30:] = -torch.inf
    chosen = draw(logits, torch.arange(400)[None], draw_inputs(temperature=100.0))
    assert set(chosen.flatten().tolist()) == set(range(30))


def test_draws_are_batch_invariant() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 4, VOCAB, generator=generator) * 3
    positions = torch.randint(0, 500, (6, 4), generator=generator)
    inputs = DrawInputs(
        temperature_B=torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 1.0]),
        top_k_B=torch.tensor([VOCAB, 5, VOCAB, 2, 9, VOCAB]),
        top_p_B=torch.tensor([math.inf, 0.9, 0.5, math.inf, 0.8, math.inf]),
        log_min_p_B=torch.tensor([-math.inf, -2.0, -math.inf, -math.inf, -3.0, -1.0]),
        seed_B=torch.arange(6) + 2**40,
    )
    together = draw(logits, positions, inputs)
    for b in range(6):
        alone = DrawInputs(**{name: getattr(inputs, name)[b : b + 1] for name in DrawInputs.__dataclass_fields__})
        for t in range(4):
            assert draw(logits[b : b + 1, t : t + 1], positions[b : b + 1, t : t + 1], alone).item() == together[b, t]


def slow_penalise(
    logits: list[float],
    generated: list[int],
    prompt: list[int],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in generated or token in prompt:
            value = value / repetition if value > 0 else value * repetition
        count = generated.count(token)
        value -= frequency * count
        if count:
            value -= presence
        result.append(value)
    return result


def penalty_inputs(
    generated: list[int],
    prompt: list[int],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> PenaltyInputs:
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, prompt] = True
    bias_BV = torch.zeros(1, VOCAB)
    for token, value in bias.items():
        bias_BV[0, token] = value
    return PenaltyInputs(
        counts_BV=torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=VOCAB)[None].to(torch.int32),
        prompt_seen_BV=seen,
        bias_BV=bias_BV,
        repetition_B=torch.tensor([repetition]),
        frequency_B=torch.tensor([frequency]),
        presence_B=torch.tensor([presence]),
    )


def test_penalties_match_slow_reference_with_drafts_in_context() -> None:
    generator = random.Random(13)
    for case in range(200):
        num_drafts = generator.randrange(8)
        logits = [random_logits(generator) for _ in range(num_drafts + 1)]
        generated = [generator.randrange(VOCAB) for _ in range(generator.randrange(30))]
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randrange(30))]
        drafts = [generator.randrange(6) for _ in range(num_drafts)]  # repeats are likely
        bias = {generator.randrange(VOCAB): generator.uniform(-100, 100) for _ in range(generator.randrange(5))}
        repetition = generator.choice([1.0, 1.3, 0.7])
        frequency, presence = generator.choice([0.0, 0.5, -1.0]), generator.choice([0.0, 1.5, -2.0])
        inputs = penalty_inputs(generated, prompt, bias, repetition, frequency, presence)
        before = torch.tensor([logits])
        got = penalise(before, torch.tensor([drafts], dtype=torch.int64).view(1, -1), inputs)
        expected: Tensor = torch.tensor(
            [
                [
                    slow_penalise(row, generated + drafts[:t], prompt, bias, repetition, frequency, presence)
                    for t, row in enumerate(logits)
                ]
            ]
        )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=f"case {case}")
        assert torch.equal(before, torch.tensor([logits])), "the input was changed"


def test_neutral_penalties_return_logits_unchanged() -> None:
    logits = torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(3))
    inputs = penalty_inputs([1, 2, 2, 3], [4, 5], {}, 1.0, 0.0, 0.0)
    assert torch.equal(penalise(logits, torch.tensor([[7, 8]]), inputs), logits)


def test_mask_excludes_exactly_the_tokens_with_clear_bits() -> None:
    for vocab_size in (1, 31, 32, 33, 37, 64, 200):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.randn(2, 3, vocab_size, generator=generator)
        words = torch.randint(-(2**31), 2**31, (2, 3, -(-vocab_size // 32)), generator=generator).to(torch.int32)
        masked = apply_mask(logits, words)
        for b, t, v in itertools.product(range(2), range(3), range(vocab_size)):
            is_set = int(words[b, t, v // 32]) >> (v % 32) & 1
            assert masked[b, t, v] == (logits[b, t, v] if is_set else -math.inf), f"V={vocab_size}, token {v}"


def test_mask_of_all_ones_returns_logits_bit_for_bit() -> None:
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 0, :4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    mask = torch.full((2, 3, 2), -1, dtype=torch.int32)
    mask[1] = 5
    masked = apply_mask(logits, mask)
    assert torch.equal(masked[0].view(torch.int32), logits[0].view(torch.int32))
    assert masked[1].isfinite().sum() == 3 * 4, "two tokens in each of two mask words"


def test_filters_and_draws_respect_mask() -> None:
    """Top-p, top-k and min-p apply to the tokens that the mask allows."""
    generator = random.Random(5)
    logits = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    for seed in range(300):
        allowed = generator.sample(range(VOCAB), generator.randint(1, 6))
        mask = torch.tensor([sum(1 << v for v in allowed if v < 32), sum(1 << (v - 32) for v in allowed if v >= 32)])
        masked = apply_mask(logits, mask.to(torch.int32).view(1, 1, 2))
        inputs = draw_inputs(
            temperature=generator.choice([0.0, 1.0, 5.0]),
            top_k=generator.choice([0, 3]),
            top_p=generator.choice([1.0, 0.6]),
            min_p=generator.choice([0.0, 0.2]),
            seed=seed,
        )
        drawn = int(draw(masked, torch.tensor([[seed]]), inputs))
        assert drawn in allowed, f"seed {seed}: drawn {drawn}, allowed {allowed}"


def test_tiny_temperature_and_repetition_penalty_behave_like_greedy() -> None:
    generator = random.Random(16)
    for temperature, repetition in itertools.product(
        (0.0, 5e-324, 1e-45, 1e-38, 1e-20), (1.0, 1e-3, 1e-20, 1e-45, 5e-324)
    ):
        logits = torch.tensor([[random_logits(generator)]])
        logits[0, 0, 3], logits[0, 0, 20] = -math.inf, 9.0
        penalised = penalise(
            logits, torch.zeros(1, 0, dtype=torch.int64), penalty_inputs([], [1, 2, 3, 20], {}, repetition, 0.0, 0.0)
        )
        assert penalised[0, 0, 3] == -math.inf
        assert not penalised.isnan().any()
        if repetition < 1:
            assert int(penalised.argmax()) == 20
        drawn = draw(penalised, torch.tensor([[9]]), draw_inputs(temperature=temperature, top_p=0.9, min_p=0.1))
        assert int(drawn) == int(penalised.argmax()), (temperature, repetition)
