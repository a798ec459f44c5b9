"""Where a prompt's time goes, kernel by kernel, as torch's profiler saw it. For finding what is slow, not for figures:
the profiler slows it down."""

from __future__ import annotations

from benchmarks import trace
from benchmarks.prefill_cases import WARM_UPS, PromptCase, Words
from benchmarks.prefill_engine import PromptEngine
from benchmarks.profile_step import shares_table


def profile_prompt(engine: PromptEngine, case: PromptCase) -> str:
    """A table of one prompt, up to its first token: here that is the one step.

    The profiler must have been there before the engine was built; without overlap nothing runs behind the prompt."""
    words = Words(0, engine.model.spec.num_real_tokens)
    context = words(case.context)
    if context:
        engine.cache_context(context, compute=False)
    for _ in range(WARM_UPS):
        engine.ask(context + words(case.count))
    prompt = context + words(case.count)
    answers = []
    timeline = trace.record(lambda: answers.append(engine.ask(prompt)), 1)
    waited = f"{answers[0].first_token_s * 1e3:.3f} ms to the first token by the host's clock"
    return f"{engine.model.spec.name}, {case}: {waited}; kernels of that step:\n\n{shares_table(timeline)}"
