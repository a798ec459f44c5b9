"""Checks before a prefill is measured: a prompt after a cached prefix gives the same result as the whole prompt.

Compares the tokens of a small model in float32 with those on the CPU without cache and drafts, and the logits and
states of the first layers of the timed model in bfloat16 at resume points.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from agentspec.config import Device, EngineConfig
from agentspec.engine.assembly import Assembly, assemble
from agentspec.models.hf_config import TextConfig
from agentspec.runtime.request import new_request
from agentspec.types import Breakpoint, CheckpointKind, SamplingParams, tokens
from agentspec.wire import FinishEvent, Submit, TokensEvent
from benchmarks.block_checks import relative_error
from benchmarks.decode_checks import CheckFailedError
from benchmarks.prefill_cases import Words
from benchmarks.prefill_engine import PromptEngine, Room
from benchmarks.published import make_model
from benchmarks.running_engine import let_go

SESSION_TURNS = ((150, 12), (70, 20), (1, 9), (130, 8))
"""(new prompt tokens, generated tokens) of each turn."""
NUM_SESSIONS = 2

RESUME_POINTS = (64, 704, 1_536, 2_048)
"""Boundaries of one prompt; each one is reached by resuming from the one before."""
RESUME_LAYERS = 4
"""Layers of the check: three recurrent ones and one of attention. All layers would be useless: with random weights each
layer amplifies rounding errors, and 32 layers in bfloat16 differ from float32 by a quarter of the logits' norm."""
RESUME_VOCABULARY = 8_192

TOLERANCE = 2**-4
"""Relative tolerance of logits and states in bfloat16, by norms. Accumulation order depends on the height of a matmul,
and rounding in attention on the split of the keys; four layers give about 2^-6. A wrong row gives about 1."""
COARSE_TOLERANCE = 2**-2
"""The same where rounding has larger effects: it may change a token's expert, or an 8-bit value."""
LEAST_OF_ANOTHER = 2**-1
"""Minimum difference of another prompt's logits, so that the check can detect a wrong prefix."""


def check_cached_turns(device: Device) -> str:
    """Compare tiny-agent's greedy float32 sessions on the device with cache, graphs and drafts with those on the CPU
    without them, token for token.

    Return a description. Raises CheckFailedError at the first difference, or when the cache had no hits."""
    config = EngineConfig(dtype="float32", memory_gib=0.5, max_running=NUM_SESSIONS, max_context=2048)
    reference = assemble(replace(config, device="cpu", draft_tokens=0, prefix_cache=False))
    with_cache = assemble(replace(config, device=device, draft_tokens=3))
    expected, _ = all_sessions(reference)
    found, num_cached = all_sessions(with_cache)
    for name, ours in found.items():
        if ours != expected[name]:
            raise CheckFailedError(
                f"{name}: {ours} on {device} with cache and drafts, {expected[name]} on the CPU without"
            )
    if not num_cached:
        raise CheckFailedError("no turn found anything in the cache")
    num_tokens = sum(map(len, found.values()))
    return (
        f"tiny-agent, float32, greedy: {num_tokens} tokens on {device} behind {num_cached} cached ones equal the "
        f"CPU's, without cache and drafts"
    )


def all_sessions(parts: Assembly) -> tuple[dict[str, list[int]], int]:
    """Run sessions concurrently; return each turn's tokens, and the number of cached prompt tokens."""
    found: dict[str, list[int]] = {}
    num_cached = 0
    prompts: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
    words = [random.Random(number) for number in range(NUM_SESSIONS)]
    for turn, (num_new, num_generated) in enumerate(SESSION_TURNS):
        names = {f"session {number}, turn {turn}": number for number in range(NUM_SESSIONS)}
        for name, number in names.items():
            prompts[number] += words[number].choices(range(parts.spec.num_real_tokens), k=num_new)
            submit = Submit(
                request_id=name,
                prompt_ids=list(prompts[number]),
                sampling=SamplingParams(temperature=0.0, max_tokens=num_generated, ignore_eos=True),
                breakpoints=[Breakpoint(len(prompts[number]), CheckpointKind.USER)],
                session_id=str(number),
            )
            found[name] = []
            request = new_request(
                submit,
                number=len(found),
                spec=parts.spec,
                max_length=parts.info.max_context,
                engine_seed=0,
                token_bytes=None,
            )
            parts.loop.submit(request)
        while parts.loop.has_work:
            for event in parts.loop.run_once():
                if isinstance(event, TokensEvent):
                    found[event.request_id] += event.token_ids
                elif isinstance(event, FinishEvent):
                    num_cached += event.usage.cached_tokens
        for name, number in names.items():
            prompts[number] += found[name]
    return found, num_cached


def check_resume_points(model: str, config: TextConfig, device: torch.device) -> str:
    """Compare, on the first layers, the state at each resume point after resuming from point to point with the state
    after one whole prefill.

    Return a description. Raises CheckFailedError when they differ too much, or when a wrong prefix's state doesn't."""
    end = RESUME_POINTS[-1]
    tolerance = TOLERANCE if config.moe is None and config.quantization is None else COARSE_TOLERANCE
    cut = replace(
        config, layer_types=config.layer_types[:RESUME_LAYERS], vocab_size=min(RESUME_VOCABULARY, config.vocab_size)
    )
    cut_model = make_model(model, cut, device=device, dtype=torch.bfloat16)
    engine = PromptEngine(cut_model, device, Room(longest=end + 64, others=(len(RESUME_POINTS) + 2) * end))
    words = Words(3, cut_model.spec.num_real_tokens)
    prompt, other = words(end + 1), words(end + 1)
    worst: dict[str, float] = {}
    expected: dict[str, Tensor] = {}
    for point, expected, found in resumed_and_whole(engine, prompt):
        for name, tensor in found.items():
            error = relative_error(tensor, expected[name])
            worst[name] = max(worst.get(name, 0.0), error)
            if not error <= tolerance:
                raise CheckFailedError(
                    f"{model}: {name} after {point} tokens, resumed: off by {error:.1e} from a whole prefill's"
                )
    _ask_up_to(engine, other, end, "other")
    wrong = relative_error(_state_at(engine, other, end, "other")["logits"], expected["logits"])
    if not wrong >= LEAST_OF_ANOTHER:
        raise CheckFailedError(
            f"{model}: another prompt's logits are only {wrong:.1e} away: the check can't tell one from the other"
        )
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    del engine
    let_go(cut_model)
    return (
        f"{model}, {len(cut.layer_types)} layers, bfloat16: prompts resumed at {RESUME_POINTS[:-1]} are as computed "
        f"at once (largest relative errors:"
        f" {errors}; another prompt's logits: {wrong:.1f})"
    )


def resumed_and_whole(
    engine: PromptEngine, prompt: list[int]
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
    """Each resume point, with its state after a whole prefill, and after a prefill resumed at the point before."""
    previous = 0
    for point in RESUME_POINTS:
        if _ask_up_to(engine, prompt, point, f"whole {point}"):
            raise CheckFailedError("a new prompt was found in the cache")
        cached = _ask_up_to(engine, prompt, point, "resumed")
        if cached != previous:
            raise CheckFailedError(f"resumed at {cached} instead of {previous}")
        yield point, _state_at(engine, prompt, point, f"whole {point}"), _state_at(engine, prompt, point, "resumed")
        previous = point


def _ask_up_to(engine: PromptEngine, prompt: list[int], point: int, namespace: str) -> int:
    """Prefill with a checkpoint at `point`; return the number of cached tokens."""
    answer = engine.ask(prompt[: point + 1], breakpoints=[(point, CheckpointKind.BRANCH)], namespace=namespace)
    return answer.cached_tokens


@torch.inference_mode()
def _state_at(engine: PromptEngine, prompt: list[int], point: int, namespace: str) -> dict[str, Tensor]:
    """The state of the checkpoint, and the logits computed from it."""
    found = engine.cache.match(namespace, tokens(prompt), limit=point)
    if found.num_tokens != point:
        raise CheckFailedError(f"the checkpoint at {point} isn't there")
    pools = engine.model.pools
    logits_V = engine.model.logits(pools.hidden_RH[found.row])[: engine.model.spec.num_real_tokens]
    return {
        "logits": logits_V,
        "states": pools["ssm_LRVDK"][:, found.row].clone(),
        "conv rows": pools["conv_LR3C"][:, found.row].clone(),
    }
