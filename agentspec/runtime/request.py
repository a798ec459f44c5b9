"""One request from submit to its terminal event: its state, and how its text and usage grow.

Makes no decisions (the scheduler does), and knows no device facts beyond row ids and lengths. Knows token ids, never
logits.
"""

from __future__ import annotations

import enum
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentspec.cache.leases import Fetch, Lease
from agentspec.errors import ContextLengthError, RequestError
from agentspec.fair_queue import Flow
from agentspec.runtime.admission import WorkingSet
from agentspec.runtime.constraint import DEAD_END, Constraint, MaskRows
from agentspec.runtime.least_tokens import MET, LeastTokens
from agentspec.runtime.plan import MAX_ALTERNATIVES, OwnRows, SlotJoin, SlotOutcome
from agentspec.text.detokenizer import Detokenizer
from agentspec.types import STOP_ID, STOP_RUNNING, CheckpointKind, FinishReason, ModelSpec, TokenScore, tokens
from agentspec.wire import FinishEvent, SpecStats, Submit, TokensEvent, Usage

logger = logging.getLogger("agentspec")


class Phase(enum.Enum):
    WAITING = enum.auto()
    FETCHING = enum.auto()
    """Admitted; the state it resumes from is being copied from host memory. That counts as a step in flight."""
    PREFILL = enum.auto()
    DECODE = enum.auto()
    LEAVING = enum.auto()
    """Ended or retracted by the host while a step that contains it is in flight."""
    DONE = enum.auto()


@dataclass(slots=True)
class PendingCheckpoint:
    """A boundary at which prefill will leave a checkpoint."""

    length: int
    kind: CheckpointKind


@dataclass(slots=True, eq=False)
class Request:
    """A turn in flight. `sequence` is prompt + output: every token that is known and kept."""

    submit: Submit
    number: int
    """Order of arrival."""
    seed: int
    stop_ids: tuple[int, ...]
    length_limit: int
    """Length of `sequence` at which the request ends with LENGTH."""
    detokenizer: Detokenizer | None
    sequence: array[int]
    constraint: Constraint | None = None
    """Positioned after the last token of `sequence`."""
    phase: Phase = Phase.WAITING
    usage: Usage = field(default_factory=Usage)
    scores: list[TokenScore] = field(default_factory=list)

    lease: Lease | None = None
    slot: int | None = None
    state_row: int = 0
    """Row that holds the state after `computed` tokens, as planned so far."""
    computed: int = 0
    """Tokens that planned prefill chunks have computed."""
    rows: OwnRows | None = None
    need: WorkingSet | None = None
    """Memory that this turn would take, as admission last estimated it; None: not estimated yet."""
    pending: list[PendingCheckpoint] = field(default_factory=list)
    turn_trusted: bool = True
    """The generated turn is expected to come back unchanged, so its checkpoint is worth a row."""
    promised: set[int] = field(default_factory=set)
    """Lengths of the checkpoints that prefill will still publish: pending and in flight."""
    prompt_checkpoint: int = 0
    """Length of the rolling checkpoint that prefill leaves in `rows.newer`; 0: none."""
    rolling: tuple[tuple[int, int], ...] = ()
    """(row, length) of the rolling checkpoints as of the last collected step."""
    takes_first_step: bool = False
    """Joined, and the outcome of its first step is not collected yet."""
    drafts: list[int] | None = None
    """For a constrained request: the drafts of its next window. None: unknown until the step in flight is collected."""
    dead_end: int | None = None
    """Number of emitted tokens of the window in flight after which the grammar allows nothing; None: no dead end."""
    stepped_at: float | None = None
    """When the host had the results of its last step; None: none since it joined."""
    times_passed_over: int = 0
    """Prompt passes in which it got no tokens."""
    in_flight: int = 0
    """Launched steps that contain this request and are not collected."""
    ending: FinishReason | None = None
    """Why a LEAVING request leaves; None: it is retracted and will run again."""
    stop_match: int | str | None = None
    error: str | None = None
    """What went wrong, if `ending` is ERROR."""
    refused: str | None = None
    """The field of `submit` that caused the error; None: none of them."""
    matched: bool = False
    """Copies were made for the next window, when last known."""
    preemptions: int = 0
    counted_cached: bool = False

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def session_key(self) -> str:
        """The session that admission counts this turn to; a turn without a session is one of its own."""
        session_id = self.submit.session_id
        return f"request {self.number}" if session_id is None else f"session {session_id} of {self.submit.owner}"

    @property
    def flow(self) -> Flow:
        return flow_of(self.submit)

    @property
    def fetch(self) -> Fetch | None:
        """The running copy of its state from host memory."""
        return None if self.lease is None else self.lease.fetch

    @property
    def prompt_length(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def prefill_end(self) -> int:
        """End of prefill: all known tokens."""
        return len(self.sequence)

    @property
    def needs_scores(self) -> bool:
        """Prompt scores were requested and are not complete. They need every position computed, so such a request uses
        no cache."""
        return self.submit.prompt_logprobs is not None and len(self.scores) < self.prompt_length - 1

    @property
    def decodes(self) -> bool:
        """False for a request that only wants its prompt computed (max_tokens 0)."""
        return self.length_limit > self.prompt_length

    @property
    def waits_for_drafts(self) -> bool:
        """Constrained, and the drafts of its next window are unknown until the step in flight is collected."""
        return self.constraint is not None and self.phase is Phase.DECODE and self.drafts is None

    def join_slot(self) -> SlotJoin:
        """Start decoding in `slot`: everything that the device needs to know of the request."""
        assert self.lease is not None
        assert self.slot is not None
        assert self.rows is not None
        self.phase = Phase.DECODE
        self.rolling = ((self.rows.newer, self.prompt_checkpoint), (self.rows.older, 0))
        self.takes_first_step, self.matched, self.drafts, self.stepped_at = True, False, [], None
        submit = self.submit
        return SlotJoin(
            request_id=self.request_id,
            slot=self.slot,
            length=len(self.sequence) - 1,
            last_token=self.sequence[-1],
            rows=self.rows,
            checkpoint_length=self.prompt_checkpoint,
            page_ids=list(self.lease.page_ids),
            length_limit=self.length_limit,
            stop_ids=self.stop_ids,
            seed=self.seed,
            sampling=submit.sampling,
            prompt_ids=self.sequence[: self.prompt_length],
            output_ids=self.sequence[self.prompt_length :],
            forced_output=None if submit.forced_output is None else tokens(submit.forced_output),
            constrained=self.constraint is not None,
            logprobs=submit.logprobs,
        )

    def next_masks(self, num_drafted: int, *, width: int) -> MaskRows | None:
        """Masks of the next window, of at most num_drafted drafts; the drafts are unknown from then on. Only for a
        constrained request. width: most columns of a window.

        None: the grammar failed or allows nothing, which ends this request alone with ERROR. A dead end after drafts is
        masked as if everything were allowed, so that the device has something to sample: `take_outcome` drops the
        result, and the stream is the same as without drafts."""
        assert self.constraint is not None
        assert self.drafts is not None
        drafts, self.drafts = self.drafts[:num_drafted], None
        if isinstance(self.constraint, LeastTokens) and self.constraint.is_met:
            met, self.constraint = self.constraint, self.constraint.inner
            if self.constraint is None:
                self.dead_end = None
                return met.free_rows(width)
        try:
            masks = self.constraint.masks(drafts)
        except Exception as error:
            self._fail(error)
            return None
        dead = ~masks.any(axis=1)
        self.dead_end = int(dead.argmax()) if dead.any() else None
        if self.dead_end == 0:
            self._refuse_dead_end(0)
            return None
        masks[dead] = -1
        return masks

    def take_outcome(self, outcome: SlotOutcome) -> TokensEvent | None:
        """Add one step's emitted tokens; sets `ending` and `stop_match` if the request ends here.

        Tokens after a stop string or a dead end are dropped. Returns the event to send, or None if the step added
        nothing."""
        end = len(outcome.emitted) if self.dead_end is None else self.dead_end
        is_dead = len(outcome.emitted) > end
        if is_dead:
            outcome = replace(outcome, emitted=outcome.emitted[:end], num_accepted=end, stop=STOP_RUNNING)
        if not self.takes_first_step:  # a first step verifies nothing
            self._count(outcome)
        self.takes_first_step = False
        self.rolling, self.matched = outcome.checkpoints, outcome.matched
        if self.constraint is not None:
            self.drafts = outcome.drafts
        ids = outcome.emitted
        if not ids:
            return None
        text = ""
        shown = ids[:-1] if outcome.stop == STOP_ID else ids  # a stop id is never part of the text
        if self.detokenizer is not None:
            pushed = self.detokenizer.push(shown)
            text = pushed.text
            if pushed.stop is not None:
                ids = ids[: pushed.num_tokens]
                self.ending, self.stop_match = FinishReason.STOP, pushed.stop
        if self.constraint is not None and self.ending is None:
            try:
                self.constraint.advance(ids)
            except Exception as error:
                self._fail(error)
                return None
        self.sequence.extend(ids)
        self.usage.completion_tokens += len(ids)
        if self.ending is None and outcome.stop != STOP_RUNNING:
            self.ending = FinishReason.STOP if outcome.stop == STOP_ID else FinishReason.LENGTH
            self.stop_match = ids[-1] if outcome.stop == STOP_ID else None
        elif self.ending is None and is_dead:
            self._refuse_dead_end(end)
        scores = None if outcome.scores is None else outcome.scores[: len(ids)]
        return TokensEvent(request_id=self.request_id, token_ids=ids, text=text, scores=scores)

    def finish(self, reason: FinishReason) -> FinishEvent:
        """The terminal event. Text that was held back is sent with it, unless a stop string ended the request."""
        held = ""
        if self.detokenizer is not None and not isinstance(self.stop_match, str):
            held = self.detokenizer.flush()
        return FinishEvent(
            request_id=self.request_id,
            reason=reason,
            usage=self.usage,
            text=held,
            stop_match=self.stop_match,
            error=self.error,
            refused=self.refused,
            prompt_scores=None if self.submit.prompt_logprobs is None or self.needs_scores else self.scores,
        )

    def _fail(self, error: Exception) -> None:
        logger.exception("the grammar of request %s failed", self.request_id)
        self.ending, self.error = FinishReason.ERROR, f"the grammar failed: {type(error).__name__}: {error}"

    def _refuse_dead_end(self, column: int) -> None:
        """End the request because no token is allowed after this column of the last window."""
        if isinstance(self.constraint, LeastTokens) and self.constraint.emptied(column):
            self.ending, self.error, self.refused = FinishReason.ERROR, MET, "sampling.min_tokens"
        else:
            self.ending, self.error, self.refused = FinishReason.ERROR, DEAD_END, "grammar.source"

    def _count(self, outcome: SlotOutcome) -> None:
        if not outcome.emitted:
            return
        spec = self.usage.spec
        spec.num_steps += 1
        accepted = min(outcome.num_accepted, outcome.num_drafted)
        spec.num_drafted += outcome.num_drafted
        spec.num_accepted += accepted
        _add_ones(spec.drafted_by_position, outcome.num_drafted, width=outcome.num_drafted)
        _add_ones(spec.accepted_by_position, accepted, width=outcome.num_drafted)
        if len(spec.histogram) <= accepted:
            spec.histogram.extend([0] * (accepted + 1 - len(spec.histogram)))
        spec.histogram[accepted] += 1


def flow_of(submit: Submit) -> Flow:
    return Flow(submit.owner, submit.session_id or "")


def _add_ones(counts: list[int], upto: int, *, width: int) -> None:
    """Add one at each position below `upto`; extend the list to at least `width`."""
    counts.extend([0] * (width - len(counts)))
    for position in range(upto):
        counts[position] += 1


def new_request(
    submit: Submit,
    *,
    number: int,
    spec: ModelSpec,
    max_length: int,
    engine_seed: int,
    token_bytes: list[bytes] | None,
    constraint: Constraint | None = None,
    allow_forced_output: bool = False,
    forces_acceptance: bool = False,
) -> Request:
    """Check a submit against the model and make its request.

    `max_length`: longest sequence that the engine can hold. `constraint`: the submit's compiled grammar, at its
    beginning. `allow_forced_output`: the engine was started for it. `forces_acceptance`: the engine accepts drafts that
    the target did not choose. Raises RequestError naming the field that is wrong."""
    ids, sampling = submit.prompt_ids, submit.sampling
    sequence = _checked_ids("prompt_ids", ids, spec)
    sampling.validate(vocab_size=spec.vocab_size)
    num_forced = _check_forced(submit, spec, allowed=allow_forced_output)
    least = max(1, num_forced, sampling.min_tokens)
    wanted = len(ids) + (least if sampling.max_tokens is None else sampling.max_tokens)
    if wanted > max_length:
        asked = f"max_tokens {sampling.max_tokens}"
        if sampling.max_tokens is None or (least > 1 and len(ids) + least > max_length):
            of_least = {
                1: "at least one new token",
                num_forced: f"{num_forced} forced tokens",
                sampling.min_tokens: f"min_tokens {least}",
            }
            asked = of_least[least]
        raise ContextLengthError(
            "prompt_ids", f"{len(ids)} tokens", f"with {asked} exceeds the context limit of {max_length} tokens"
        )
    if sampling.stop and token_bytes is None:
        raise RequestError("stop", list(sampling.stop), "needs a tokenizer, and this checkpoint has none")
    for field_name, num_alternatives in (("prompt_logprobs", submit.prompt_logprobs), ("logprobs", submit.logprobs)):
        if num_alternatives is not None and not 0 <= num_alternatives <= MAX_ALTERNATIVES:
            raise RequestError(field_name, num_alternatives, f"must be between 0 and {MAX_ALTERNATIVES}")
    if constraint is not None and sampling.ignore_eos:
        raise RequestError("ignore_eos", True, "can't go with a grammar, which says itself where the output ends")
    previous = 0
    for point in submit.breakpoints:
        if not previous <= point.offset <= len(ids):
            raise RequestError("breakpoints", point.offset, "offsets must ascend and lie inside the prompt")
        previous = point.offset
    stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*spec.stop_token_ids, *sampling.stop_token_ids)
    if sampling.min_tokens and stop_ids:
        _check_least(submit, stop_ids, forces_acceptance=forces_acceptance)
        constraint = LeastTokens(
            constraint, num_tokens=sampling.min_tokens, stop_ids=stop_ids, vocab_size=spec.vocab_size
        )
    return Request(
        submit=submit,
        number=number,
        seed=sampling.seed if sampling.seed is not None else derive_seed(engine_seed, number),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        length_limit=max_length if sampling.max_tokens is None else wanted,
        detokenizer=None
        if token_bytes is None
        else Detokenizer(token_bytes, sampling.stop, min_tokens=sampling.min_tokens),
        sequence=sequence,
        constraint=constraint,
        usage=Usage(prompt_tokens=len(ids), spec=SpecStats()),
    )


def _checked_ids(field: str, ids: Sequence[int], spec: ModelSpec) -> array[int]:
    if not ids:
        raise RequestError(field, ids, "must hold at least one token")
    try:
        checked = tokens(ids)
        # Vectorised: a Python loop over a long prompt would delay its first token.
        values = np.frombuffer(checked, dtype=np.intc)
        is_right = values.min() >= 0 and values.max() < spec.vocab_size
    except OverflowError:
        is_right = False
    if not is_right:
        bad = next(token for token in ids if not 0 <= token < spec.vocab_size)
        raise RequestError(field, bad, f"is not a token id below {spec.vocab_size}")
    return checked


def _check_forced(submit: Submit, spec: ModelSpec, *, allowed: bool) -> int:
    """Check a forced output; returns its number of tokens, 0 if there is none."""
    ids, limit = submit.forced_output, submit.sampling.max_tokens
    if ids is None:
        return 0
    if not allowed:
        raise RequestError(
            "forced_output",
            ids[:8],
            "is for benchmarks: only an engine that was started with --allow-forced-output takes it",
        )
    _checked_ids("forced_output", ids, spec)
    if submit.grammar is not None:
        raise RequestError("forced_output", ids[:8], "can't go with a constrained output")
    if limit is not None and len(ids) > limit:
        raise RequestError("forced_output", f"{len(ids)} tokens", f"are more than max_tokens {limit}")
    return len(ids)


def _check_least(submit: Submit, stop_ids: tuple[int, ...], *, forces_acceptance: bool) -> None:
    """Check a min_tokens that has to hold back these stop ids."""
    num_tokens = submit.sampling.min_tokens
    if forces_acceptance:
        raise RequestError(
            "min_tokens",
            num_tokens,
            "can't be kept while acceptance is forced: a draft may be a stop id. It can with ignore_eos",
        )
    early = next((token for token in (submit.forced_output or [])[:num_tokens] if token in stop_ids), None)
    if early is not None:
        raise RequestError("min_tokens", num_tokens, f"is more than forced_output has before the stop id {early}")


def derive_seed(engine_seed: int, number: int) -> int:
    """A seed for a request without one: splitmix64 of the engine's seed and the order of arrival, without the sign
    bit."""
    mask = (1 << 64) - 1
    z = (engine_seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
