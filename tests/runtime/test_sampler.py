"""The sampler between slot buffers and kernels: parameters reach their rows, and counts include what was emitted."""

from __future__ import annotations

import random

import torch

from agentspec.kernels.slots import OutcomeRows, Window
from agentspec.runtime.plan import OwnRows, SlotJoin
from agentspec.runtime.sampler import choose, count_emitted
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.types import SamplingParams, tokens

VOCAB = 20


def make_buffers(parameters: list[SamplingParams], *, prompt: list[int], output: list[int]) -> StepBuffers:
    buffers = StepBuffers.allocate(
        max_running=len(parameters),
        max_draft_tokens=2,
        max_pages_per_slot=2,
        vocab_size=VOCAB,
        num_model_stop_ids=1,
        block_tokens=16,
        device=torch.device("cpu"),
    )
    buffers.join(
        [
            SlotJoin(
                request_id=f"r{slot}",
                slot=slot,
                length=len(prompt) + len(output) - 1,
                last_token=(prompt + output)[-1],
                rows=OwnRows(write=[2, 3, 4], newer=5, older=6),
                page_ids=[1],
                length_limit=100,
                stop_ids=(7,),
                seed=slot + 2**50,
                sampling=sampling,
                prompt_ids=tokens(prompt),
                output_ids=tokens(output),
            )
            for slot, sampling in enumerate(parameters)
        ]
    )
    return buffers


def window_of(tokens: torch.Tensor, start: int) -> Window:
    rows = torch.zeros_like(tokens)
    starts = torch.full_like(tokens[:, 0], start)
    return Window(tokens_BT=tokens, start_B=starts, read_row_B=starts, write_rows_BT=rows, page_table_BP=rows.int())


def test_each_parameter_reaches_its_slot() -> None:
    logits = torch.linspace(3.0, -3.0, VOCAB)
    logits[1] = logits[0] - 0.01
    parameters = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias={9: 100.0}),
        SamplingParams(temperature=0.0, presence_penalty=2.0),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=5.0, top_p=0.01),
        SamplingParams(temperature=5.0, min_p=0.9995),
    ]
    buffers = make_buffers(parameters, prompt=[1], output=[0])
    slots = torch.arange(len(parameters))
    rows = logits.expand(len(parameters), 1, VOCAB).contiguous()
    window = window_of(torch.zeros(len(parameters), 1, dtype=torch.int64), 39)
    chosen = choose(buffers, slots, window, rows, sampled=True, constrained=False)
    assert chosen[:, 0].tolist() == [0, 9, 1, 1, 2, 0, 0, 0]


def test_greedy_paths_agree() -> None:
    """A greedy slot gets the same tokens whether or not another slot in the batch samples."""
    parameters = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, frequency_penalty=0.5)]
    buffers = make_buffers(parameters, prompt=[1, 2], output=[3])
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    logits[..., 15:] = -torch.inf
    slots = torch.tensor([0, 1])
    window = window_of(torch.tensor([[3, 1, 1], [3, 2, 2]]), 2)
    sampled, greedy = (
        choose(buffers, slots, window, logits, sampled=sampled, constrained=False) for sampled in (True, False)
    )
    assert torch.equal(sampled[0], greedy[0])


def test_counts_follow_emitted_tokens() -> None:
    generator = random.Random(9)
    buffers = make_buffers([SamplingParams(presence_penalty=1.0)] * 3, prompt=[1, 1], output=[4, 4, 5])
    expected = [[0] * VOCAB for _ in range(4)]
    for row in expected[:3]:
        row[4], row[5] = 2, 1
    for _ in range(20):
        slots = generator.sample(range(3), 2)
        emitted = [[generator.randrange(3) for _ in range(3)] for _ in slots]
        num_emitted = [generator.randrange(4) for _ in slots]  # 0: an inert slot
        outcome_BF = torch.full((2, OutcomeRows.num_fields(3)), 9)
        OutcomeRows.of(outcome_BF).num_emitted_B.copy_(torch.tensor(num_emitted))
        OutcomeRows.of(outcome_BF).tokens_BT.copy_(torch.tensor(emitted))
        count_emitted(buffers.sampling.counts_SV, torch.tensor(slots), outcome_BF)
        for slot, ids, count in zip(slots, emitted, num_emitted, strict=True):
            for token in ids[:count]:
                expected[slot][token] += 1
    assert buffers.sampling.counts_SV.tolist() == expected
    assert buffers.sampling.prompt_seen_SV[0].nonzero().flatten().tolist() == [1]


def test_a_join_without_bias_clears_the_bias_before_it() -> None:
    buffers = make_buffers([SamplingParams(logit_bias={3: 7.5, 4: -1.0})], prompt=[1], output=[])
    assert buffers.sampling.bias_SV[0, 3:5].tolist() == [7.5, -1.0]
    again = make_buffers([SamplingParams()], prompt=[1], output=[])
    assert not again.sampling.bias_SV.any()
