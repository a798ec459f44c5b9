"""Checks before decode steps are measured: the device equals the CPU's reference, and graphs equal eager calls."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from agentspec.config import Device, EngineConfig
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.ranks import RankOptions
from agentspec.runtime.request import new_request
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, SamplingParams
from agentspec.wire import FinishEvent, Submit, TokensEvent
from benchmarks.published import PrefilledModel
from benchmarks.running_engine import Case, RunningEngine, let_go

PROMPT_LENGTHS = (1, 7, 64, 131)
NUM_TOKENS = 48
NUM_DRAFTS = 3
NUM_CONTEXT = 200
NUM_STEPS = 24


class CheckFailedError(Exception):
    """The code to be measured is wrong."""


def check_small_model(device: Device, *, num_copies: int = 0, num_ranks: int = 1) -> str:
    """Compare tiny-agent's greedy float32 tokens with drafts on the device with those without drafts on the CPU. Return
    a description.

    num_copies: behind the MTP drafts, in slots with rings. num_ranks: that share the model on the device.

    Raises CheckFailedError at the first difference."""
    words = random.Random(0)
    config = EngineConfig(dtype="float32", memory_gib=0.5, max_running=len(PROMPT_LENGTHS), max_context=1024)
    reference = assemble(replace(config, device="cpu", draft_tokens=0))
    prompts = [[words.randrange(reference.spec.num_real_tokens) for _ in range(length)] for length in PROMPT_LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected, _ = streams(reference, prompts, greedy)
    drafting = replace(config, device=device, draft_tokens=NUM_DRAFTS)
    behind = ""
    if num_copies:
        drafting = replace(drafting, state_form="ring", copy_drafts=num_copies)
        behind = f" and {num_copies} copies"
    if num_ranks > 1:
        drafting = replace(drafting, tensor_parallel=num_ranks)
        behind += f", on {num_ranks} ranks"
    under_test = assemble(drafting, rank_options=RankOptions(check_every=1, late_seconds=60.0))
    try:
        found, num_accepted = streams(under_test, prompts, greedy)
    finally:
        if under_test.ranks is not None:
            under_test.close()
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            place = next(place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
            raise CheckFailedError(
                f"prompt {index} of {PROMPT_LENGTHS[index]} tokens: token {place} is {ours[place]} on {device} with "
                f"{NUM_DRAFTS} drafts{behind},"
                f" {theirs[place]} on the CPU without"
            )
    num_tokens = sum(map(len, found))
    return (
        f"tiny-agent, float32, greedy: {num_tokens} tokens on {device} with {NUM_DRAFTS} drafts{behind} a step "
        f"({num_accepted} accepted) equal the CPU's without"
    )


def streams(parts: Assembly, prompts: list[list[int]], sampling: SamplingParams) -> tuple[list[list[int]], int]:
    """Generate from all prompts in a batch; return each one's tokens, and the number of accepted drafts."""
    for number, prompt in enumerate(prompts):
        submit = Submit(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        request = new_request(
            submit, number=number, spec=parts.spec, max_length=parts.info.max_context, engine_seed=0, token_bytes=None
        )
        parts.loop.submit(request)
    emitted: list[list[int]] = [[] for _ in prompts]
    num_accepted = 0
    while parts.loop.has_work:
        for event in parts.loop.run_once():
            if isinstance(event, TokensEvent):
                emitted[int(event.request_id)].extend(event.token_ids)
            elif isinstance(event, FinishEvent):
                num_accepted += event.usage.spec.num_accepted
    return emitted, num_accepted


def check_graphs(model: PrefilledModel, device: torch.device) -> str:
    """Compare a model's steps as graphs with eager ones from the same states, bit for bit: emitted tokens, rows and
    pages. Return a description.

    Raises CheckFailedError naming the difference."""
    eager_tokens, eager_pools, _ = _after_some_steps(model, device, graphs=False)
    tokens, pools, graphs = _after_some_steps(model, device, graphs=True)
    if tokens != eager_tokens:
        raise CheckFailedError(f"{model.spec.name}: graphs emit {tokens}, eager steps {eager_tokens}")
    for name, ours, theirs in zip(("states", "conv rows", "hiddens", "pages"), pools, eager_pools, strict=True):
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise CheckFailedError(f"{model.spec.name}: graphs and eager steps leave different {name}")
    return (
        f"{model.spec.name}: {len(tokens)} steps as graphs equal eager ones, tokens, rows and pages bit for bit "
        f"(graphs: {graphs})"
    )


def _after_some_steps(
    model: PrefilledModel, device: torch.device, *, graphs: bool
) -> tuple[list[list[list[int]]], list[Tensor], str]:
    """Emitted tokens, copies of the pools without the scratch row and page, and a description of the captured
    graphs."""
    case = Case(model=model.spec.name, context=NUM_CONTEXT, batch=1, depth=NUM_DRAFTS)
    engine = RunningEngine(case, model, device, num_steps=NUM_STEPS + 1, graphs=graphs)
    emitted = [engine.step() for _ in range(NUM_STEPS)]
    engine.settle()
    pools = model.pools
    rows = [row for row in range(pools.hidden_RH.shape[0]) if row != SCRATCH_ROW]
    pages = [page for page in range(pools["kv_AP2SGD"].shape[1]) if page != SCRATCH_PAGE]
    copies = [
        pools["ssm_LRVDK"][:, rows],
        pools["conv_LR3C"][:, rows],
        pools.hidden_RH[rows],
        pools["kv_AP2SGD"][:, pages].float(),
    ]
    captured = engine.graphs
    del engine
    let_go(model)
    return emitted, copies, captured
