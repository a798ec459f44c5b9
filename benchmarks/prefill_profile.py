"""Profile a prompt by kernel with torch's profiler. For finding slow kernels, not for figures: the profiler slows it
down."""

from __future__ import annotations

from benchmarks import trace
from benchmarks.prefill_cases import WARM_UPS, PromptCase, Words
from benchmarks.prefill_engine import PromptEngine
from benchmarks.profile_step import shares_table


def profile_prompt(engine: PromptEngine, case: PromptCase) -> str:
    """A table of the kernels of one prompt until its first token, which is one step.

    The profiler must be active before the engine is built. Without overlap no step follows the prompt."""
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
