"""/metrics: the engine's counters and the server's figures in Prometheus' text format (exposition 0.0.4).

Every family has a name of ours (`agentspec_*`). Figures that vLLM has too are also exposed under vLLM's name, for
dashboards and gateways. Knows the names in `EngineClient.stats`; a counter that an engine doesn't report is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from starlette.responses import Response

from agentspec.errors import EngineClosedError
from agentspec.server.recorder import Figures
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service
from agentspec.server.tenants import Tenant
from agentspec.server.text_work import PromptFacts
from agentspec.server.unknown_fields import UnknownFields
from agentspec.types import BLOCK_TOKENS, Histogram
from agentspec.wire import ModelInfo

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]
Samples = list[tuple[dict[str, str], float]]


class Family(NamedTuple):
    """One figure under all its names."""

    kind: Kind
    name: str
    """Without the prefix `agentspec_`."""
    help: str
    value: float | Samples | Histogram
    aliases: tuple[str, ...] = ()
    """vLLM's names for it, without the prefix `vllm:`."""


ENGINE_COUNTERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "prompt_tokens_total",
        "prompt_tokens",
        "Prompt tokens of admitted requests.",
        ("prompt_tokens_total", "prefix_cache_queries_total"),
    ),
    (
        "cached_prompt_tokens_total",
        "cached_tokens",
        "Prompt tokens that came from the prefix cache.",
        ("prefix_cache_hits_total",),
    ),
    ("prefill_tokens_total", "prefill_tokens", "Tokens that prefill computed, again after a preemption included.", ()),
    (
        "preemptions_total",
        "preemptions",
        "Requests taken back to their last checkpoint for want of memory.",
        ("num_preemptions_total",),
    ),
    ("steps_total", "steps", "Steps of the engine.", ()),
    ("first_steps_total", "first_slots", "First tokens of requests, which come with the prompt.", ()),
    ("decode_steps_total", "decode_steps", "Steps with at least one decoding request.", ()),
    ("decode_slots_total", "decode_slots", "Decoding requests, summed over decode steps.", ()),
    ("checkpoints_skipped_total", "checkpoints_skipped", "Wanted checkpoints for which no row could be had.", ()),
)
"""(name, counter of the engine's stats, help, vLLM's names)."""

ENGINE_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    (
        "request_queue_time_seconds",
        "queue_seconds",
        "From a request's arrival to the first step that computes some of its prompt.",
    ),
    ("request_prefill_time_seconds", "prompt_seconds", "From the first step of its prompt to a request's first token."),
    ("request_decode_time_seconds", "decode_seconds", "From a request's first token to its last."),
    (
        "request_inference_time_seconds",
        "inference_seconds",
        "From the first step of its prompt to a request's last token.",
    ),
    ("iteration_tokens_total", "step_tokens", "Tokens of a step: computed ones of prompts, and emitted ones."),
)
"""(name, also vLLM's; figure of the engine's stats; help)."""

CACHE_FIGURES: tuple[tuple[Kind, str, str, str], ...] = (
    ("counter", "checkpoints_created_total", "checkpoints_created", "State checkpoints given to the prefix cache."),
    ("counter", "checkpoints_superseded_total", "checkpoints_superseded", "Checkpoints that a deeper one replaced."),
    ("counter", "checkpoints_evicted_total", "checkpoints_evicted", "Checkpoints evicted for want of memory."),
    (
        "counter",
        "checkpoints_lost_total",
        "checkpoints_lost",
        "Checkpoints evicted before a copy in the host's memory was complete.",
    ),
    ("counter", "checkpoints_fetched_total", "host_copies_fetched", "Checkpoints fetched from the host's memory."),
    ("counter", "bytes_to_host_total", "bytes_to_host", "Bytes copied to the host's memory ahead of eviction."),
    ("counter", "bytes_to_device_total", "bytes_to_device", "Bytes fetched from the host's memory."),
    ("gauge", "host_rows_used", "host_rows_used", "State rows in the host's memory."),
    ("gauge", "host_pages_used", "host_pages_used", "KV pages in the host's memory."),
    ("gauge", "checkpoints", "checkpoints_live", "State checkpoints in the prefix cache."),
    ("gauge", "sessions_held", "sessions_held", "Sessions whose prefix is held while their tool runs."),
    ("gauge", "rows_used", "rows_used", "State rows in use, checkpoints included."),
    ("gauge", "rows_free", "rows_free", "State rows free."),
    ("gauge", "pages_used", "pages_used", "KV pages in use, the prefix cache's included."),
    ("gauge", "pages_free", "pages_free", "KV pages free."),
)
"""(kind, name, figure of the cache's stats, help)."""


async def metrics(service: Service, call: Call) -> Response:
    """GET /metrics. Answers for a dead engine too: `agentspec_engine_alive` is 0, and the engine's own figures are
    absent if it can't be asked."""
    engine = service.engine
    try:
        stats = await engine.stats()
    except EngineClosedError:
        stats = {}
    families = [
        *_state(engine.info, engine.alive),
        *_engine(stats),
        *_requests(service.figures),
        *_times(service.figures),
        _unknown_fields(service.unknown),
        *_tenants(service.tenants),
    ]
    if service.text is not None and service.text.prompts is not None:
        families += _turns(service.text.prompts)
    return Response(exposition(families, service.listed_names[0]), media_type=MEDIA_TYPE)


ROUTES = (Route(method="GET", path="/metrics", handle=metrics, answers="text"),)


def exposition(families: Iterable[Family], model_name: str) -> bytes:
    """The exposition of all families. Every sample has a model label; those under vLLM's names have an engine number
    too, as their readers expect."""
    lines: list[str] = []
    for family in families:
        for name in (f"agentspec_{family.name}", *(f"vllm:{alias}" for alias in family.aliases)):
            labels = {"model_name": model_name} | ({"engine": "0"} if name.startswith("vllm:") else {})
            lines += (f"# HELP {name} {_escaped(family.help)}", f"# TYPE {name} {family.kind}")
            lines += _samples(name, family.value, labels)
    return "".join(f"{line}\n" for line in lines).encode()


def _samples(name: str, value: float | Samples | Histogram, labels: Mapping[str, str]) -> Iterator[str]:
    if isinstance(value, int | float):
        yield _sample(name, labels, value)
    elif isinstance(value, Histogram):
        cumulated = list(accumulate(value.counts))
        bounds = [*map(repr, value.bounds), "+Inf"]
        yield from (
            _sample(f"{name}_bucket", {**labels, "le": bound}, count)
            for bound, count in zip(bounds, cumulated, strict=True)
        )
        yield _sample(f"{name}_sum", labels, value.sum)
        yield _sample(f"{name}_count", labels, cumulated[-1])
    else:
        yield from (_sample(name, {**labels, **extra}, number) for extra, number in value)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text, quote=True)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value!r}"


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _unknown_fields(unknown: UnknownFields) -> Family:
    samples: Samples = [({"field": name}, float(count)) for name, count in unknown.counts.items()]
    return Family(
        "counter", "ignored_fields_total", "Requests with a field that nobody knows, which was left out.", samples
    )


def _tenants(tenants: Mapping[str, Tenant]) -> Iterator[Family]:
    """One sample per key."""
    if not tenants:
        return
    by_key = {name: {"key": name} for name in tenants}
    requests: Samples = [(by_key[name], tenant.num_requests) for name, tenant in tenants.items()]
    refused: Samples = [(by_key[name], tenant.num_refused) for name, tenant in tenants.items()]
    tokens: Samples = [
        ({**by_key[name], "kind": kind}, count)
        for name, tenant in tenants.items()
        for kind, count in (("prompt", tenant.prompt_tokens), ("output", tenant.output_tokens))
    ]
    yield Family(
        "counter", "key_requests_total", "Requests that a key sent to the engine; choices count one by one.", requests
    )
    yield Family("counter", "key_requests_refused_total", "Requests over a limit of their key.", refused)
    yield Family("counter", "key_tokens_total", "Tokens of a key's prompts and outputs.", tokens)


def _state(info: ModelInfo, alive: bool) -> list[Family]:
    forced = info.forced_acceptance is not None
    return [
        Family("gauge", "engine_alive", "1 while the engine runs.", int(alive)),
        Family(
            "gauge",
            "forced_acceptance",
            "1 in benchmarks that set acceptance: the text is then not the model's.",
            int(forced),
        ),
        Family("gauge", "max_running", "Requests that the engine decodes at the same time.", info.max_running),
        Family("gauge", "max_context_tokens", "Context limit.", info.max_context),
    ]


def _engine(stats: Mapping[str, Any]) -> Iterator[Family]:
    if "running" in stats:
        yield Family(
            "gauge", "requests_running", "Requests in the engine's slots.", stats["running"], ("num_requests_running",)
        )
        yield Family(
            "gauge",
            "requests_waiting",
            "Requests that wait for a slot or memory.",
            stats["waiting"],
            ("num_requests_waiting",),
        )
    engine, cache = stats.get("engine", {}), stats.get("cache", {})
    for name, counter, text, aliases in ENGINE_COUNTERS:
        if counter in engine:
            yield Family("counter", name, text, engine[counter], aliases)
    if "gap_counts" in engine:
        gaps = Histogram(engine["gap_bounds"], engine["gap_counts"], engine["gap_seconds"])
        yield Family("histogram", "gap_seconds", "Between two steps of a running stream, in the engine.", gaps)
        yield Family("gauge", "longest_gap_seconds", "The longest of them.", engine["longest_gap_seconds"])
    for name, figure, text in ENGINE_HISTOGRAMS:
        if figure in engine:
            yield Family("histogram", name, text, Histogram(**engine[figure]), (name,))
    for kind, name, figure, text in CACHE_FIGURES:
        if figure in cache:
            yield Family(kind, name, text, cache[figure])
    if "pages_used" in cache:
        num_pages = cache["pages_used"] + cache["pages_free"]
        needed = cache["pages_used"] - cache["tree_pages"] + cache["tree_pages_locked"]
        text = "Share of the KV pages (0 to 1) that running requests need: what the cache could evict counts as free."
        yield Family(
            "gauge", "kv_usage_ratio", text, needed / num_pages, ("kv_cache_usage_perc", "gpu_cache_usage_perc")
        )
        config = {"block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(num_pages)}
        yield Family(
            "gauge",
            "cache_config_info",
            "Tokens in a block, and KV pages in all.",
            [(config, 1)],
            ("cache_config_info",),
        )


def _requests(figures: Figures) -> Iterator[Family]:
    finished: Samples = [({"finished_reason": reason.value}, count) for reason, count in figures.finished.items()]
    yield Family(
        "counter", "requests_finished_total", "Requests that ended, by reason.", finished, ("request_success_total",)
    )
    yield Family(
        "counter",
        "generation_tokens_total",
        "Tokens sent to clients.",
        figures.generated_tokens,
        ("generation_tokens_total",),
    )
    spec = figures.usage.spec
    drafted, accepted = spec.drafted_by_position, spec.accepted_by_position
    num_steps = drafted[0] if drafted else 0
    yield Family(
        "counter", "draft_steps_total", "Steps that verified drafts.", num_steps, ("spec_decode_num_drafts_total",)
    )
    yield Family(
        "counter", "drafted_tokens_total", "Drafts.", spec.num_drafted, ("spec_decode_num_draft_tokens_total",)
    )
    yield Family(
        "counter",
        "accepted_tokens_total",
        "Accepted drafts.",
        spec.num_accepted,
        ("spec_decode_num_accepted_tokens_total",),
    )
    yield Family(
        "counter", "drafted_tokens_by_position_total", "Drafts by their place in a step, from 0.", _positions(drafted)
    )
    yield Family(
        "counter",
        "accepted_tokens_by_position_total",
        "Accepted drafts by their place in a step, from 0.",
        _positions(accepted),
        ("spec_decode_num_accepted_tokens_per_pos_total",),
    )


def _positions(counts: Iterable[int]) -> Samples:
    return [({"position": str(index)}, count) for index, count in enumerate(counts)]


def _times(figures: Figures) -> list[Family]:
    # vLLM's third is the largest of a request's choices; here a request is one choice.
    sizes = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens")
    return [
        Family(
            "histogram",
            "first_token_seconds",
            "From submit to the first token.",
            figures.first_token,
            ("time_to_first_token_seconds",),
        ),
        Family(
            "histogram",
            "between_steps_seconds",
            "Between two steps of one stream, of one or more tokens each.",
            figures.between_steps,
            ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        ),
        Family(
            "histogram",
            "seconds_per_token",
            "Mean of a request behind its first step.",
            figures.per_token,
            ("request_time_per_output_token_seconds",),
        ),
        Family(
            "histogram", "request_seconds", "From submit to the end.", figures.whole, ("e2e_request_latency_seconds",)
        ),
        Family("histogram", sizes[0], "Prompt tokens of a request.", figures.prompt_tokens, sizes[:1]),
        Family("histogram", sizes[1], "Generated tokens of a request.", figures.output_tokens, sizes[1:]),
    ]


def _turns(prompts: PromptFacts) -> list[Family]:
    return [
        Family(
            "counter", "turns_spliced_total", "Returned turns whose generated ids were put back.", prompts.num_spliced
        ),
        Family(
            "counter",
            "turns_mismatched_total",
            "Returned turns that the template renders otherwise.",
            prompts.num_mismatched,
        ),
    ]
