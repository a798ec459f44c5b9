"""`agentspec memory MODEL`: what GPUs of some sizes would hold of a model: its weights, pages and rows, and how many
requests. Needs no GPU and reads no weights.

Owns the tables. `engine/fit.py` says what the model takes, with the plan that the engine itself makes at its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentspec.commands.tables import aligned
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.fit import GPU, CardPlan, Needs, what_would_fit
from agentspec.engine.settings import dtype_of
from agentspec.errors import ConfigError
from agentspec.models.registry import why_cpu_only
from agentspec.models.stored import place
from agentspec.models.weights import resolve_checkpoint
from agentspec.runtime.memory_plan import concurrency

DEFAULT_CARD_GIB = 24.0
DEFAULT_TOKENS = 16_384
MOST_CARD_GIB = 2**16

DRIVER_BYTES = 2**30
"""Assumed for the driver, the CUDA context, libraries and the table of positions. The engine itself asks the GPU what
is free."""


def run(config: EngineConfig, card_gib: Sequence[float] | None, num_tokens: int | None) -> int:
    """Print the tables; return the exit code.

    card_gib: the GPUs' sizes in GiB; None: one of 24. num_tokens: of the requests that are counted; None: the default.
    Raises ConfigError that names field and value, CheckpointError like the loader."""
    sizes = [DEFAULT_CARD_GIB] if card_gib is None else card_gib
    for size in sizes:
        if not 0 < size <= MOST_CARD_GIB:
            raise ConfigError("card_gib", size, f"must be above 0 and at most {MOST_CARD_GIB} GiB")
    if config.device == "cpu":
        raise ConfigError("device", config.device, "the plan is one of a GPU; leave it out")
    if config.tensor_parallel > 1:
        raise ConfigError("tensor_parallel", config.tensor_parallel, "the plan is one of a single GPU; leave it out")
    model_dir = resolve_checkpoint(bundled.checkpoint_of(config.model), weights=False)
    has_weights = not config.random_weights and any(model_dir.glob("*.safetensors"))
    needs = Needs.of_checkpoint(config, model_dir, has_weights=has_weights)
    longest = config.max_context or needs.spec.max_context
    num_tokens = min(DEFAULT_TOKENS, longest) if num_tokens is None else num_tokens
    if not 1 <= num_tokens <= longest:
        raise ConfigError("tokens", num_tokens, f"must be 1 to {longest}, which is the context")
    cards = {f"{size:g} GiB": int(size * 2**30) - DRIVER_BYTES for size in sizes}
    print("\n".join([*_of_model(needs, has_weights=has_weights), "", *_of_cards(needs, cards, num_tokens)]))
    return 0


def _of_model(needs: Needs, *, has_weights: bool) -> Iterator[str]:
    """What doesn't depend on the GPU."""
    spec = needs.spec
    yield f"{spec.name}: {_size(needs.weight_bytes)} of weights"
    cells = [("part", "held as", "size")]
    cells += [(*key, _size(needs.weights[key])) for key in sorted(needs.weights, key=place)]
    yield from _indented(aligned(cells, num_left=2))
    if not has_weights:
        dtype = str(dtype_of(needs.config, GPU)).removeprefix("torch.")
        yield f"note: there are no weights: sizes are by config.json, in {dtype} where it names no other form"
    if (reason := why_cpu_only(needs.text)) is not None:
        yield f"note: {reason}"
    num_rows, ring_bytes = needs.state_per_slot
    a_token, a_ring = _size(spec.page_bytes / spec.block_tokens), f" and a ring of {_size(ring_bytes)}"
    state = [
        ("a page", f"{_size(spec.page_bytes)} ({spec.block_tokens} tokens of context, {a_token} each)"),
        ("a state row", _size(spec.row_bytes)),
        ("a slot", f"{num_rows} state rows{a_ring if ring_bytes else ''}, beside its pages"),
    ]
    yield ""
    yield from _indented(aligned(state, num_left=2))


def _of_cards(needs: Needs, cards: Mapping[str, int], num_tokens: int) -> Iterator[str]:
    """A column for each GPU that holds the model, and a line for each that doesn't. cards: bytes free on each."""
    plans = {name: needs.plan(free) for name, free in cards.items() if needs.fits(free)}
    if plans:
        columns = [_column(needs, plan, num_tokens) for plan in plans.values()]
        rows = [("on a GPU of", *plans), *((name, *(column[name] for column in columns)) for name in columns[0])]
        yield from aligned(rows, num_left=1)
    for name, free in cards.items():
        if name not in plans:
            missing = needs.missing_bytes(free)
            advice = what_would_fit(needs, free)
            yield f"{name}: does not fit, {_size(missing)} are missing{'; ' if advice else ''}{advice}"


def _column(needs: Needs, plan: CardPlan, num_tokens: int) -> dict[str, str]:
    """The cells of one GPU, by their row's name."""
    spec, settings, memory = needs.spec, plan.settings, plan.memory
    allowed = concurrency(
        memory,
        num_tokens,
        max_running=settings.max_running,
        max_draft_tokens=settings.max_drafts,
        block_tokens=spec.block_tokens,
        has_ring=settings.has_ring,
    )
    fits = num_tokens <= memory.max_length
    return {
        "  driver and libraries (assumed)": _size(DRIVER_BYTES),
        "  weights": _size(needs.weight_bytes),
        "  draft head": _size(needs.draft_head_bytes),
        "  graphs (estimated)": _size(settings.graphs_bytes()),
        "  state rows": _size(memory.num_rows * spec.row_bytes),
        "  rings": _size(plan.rings_bytes),
        "  pages": _size(memory.num_pages * spec.page_bytes),
        "  left for buffers and activations": _size(plan.buffer_bytes),
        "tokens of context in all pages": f"{(memory.num_pages - 1) * spec.block_tokens:,}",
        "tokens of the longest sequence": f"{memory.max_length:,}",
        "running requests (slots)": f"{settings.max_running:,}",
        f"requests of {num_tokens:,} tokens": f"{allowed.requests if fits else 0:,}",
        "  as many as pages allow": f"{allowed.pages:,}",
        "  as many as slots allow": f"{allowed.slots:,}",
        "  as many as rows allow": f"{allowed.rows:,}",
    }


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line.rstrip()}" for line in lines)


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:g} B"
