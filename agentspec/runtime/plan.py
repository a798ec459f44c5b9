"""What the host asks the device to do in one step, and the results it gets back: plain integers, no torch.

The scheduler writes a StepPlan; an Executor launches it and, one step later, returns its StepOutcome. `ModelExecutor`
(runtime/executor.py) runs a real model; the dry run drives the same scheduler with an executor that only counts.

Order inside one launch: prefill chunks, leaves, page updates, joins, first steps, decode. So a request whose last chunk
is in the plan joins and gets its first token in the same step. Chunks read nothing of slots; if an executor verifies
the windows of `decode_slots` together with them (runtime/ride.py), leaves and page updates come first. Neither chunks
nor windows read or write a row or page that the other writes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from agentspec.runtime.constraint import MaskRows
from agentspec.types import SamplingParams, TokenIds, TokenScore

MAX_ALTERNATIVES = 20
"""Most alternatives that may come with the score of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """A prefill chunk. Fields as in models.protocol.PrefillChunk, with host lists."""

    request_id: str
    token_ids: TokenIds
    start: int
    read_row: int
    state_writes: tuple[tuple[int, int], ...]
    page_ids: list[int]
    next_token: int | None
    """The prompt token after the chunk, against which the last row of a scored prompt is scored. None: the chunk ends
    the prompt."""
    score_top: int | None = None
    """Not None: return a TokenScore for each of `scored_ids`, with that many alternatives."""

    @property
    def scored_ids(self) -> array[int]:
        """The token after each of the chunk's tokens, up to the end of the prompt."""
        following = self.token_ids[1:]
        if self.next_token is not None:
            following.append(self.next_token)
        return following


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """The state rows that a running request owns, by purpose."""

    write: list[int]
    """max k + 1 rows: the state after column t of a window goes to row t. The first also takes the state after a
    prompt's last chunk."""
    newer: int
    """This and `older` are the spare rows, which will hold the newer and the older rolling checkpoint."""
    older: int

    @classmethod
    def of(cls, rows: list[int]) -> Self:
        """rows: `types.rows_of_request` of them, in any order."""
        *write, newer, older = rows
        return cls(write=write, newer=newer, older=older)

    @property
    def prompt(self) -> int:
        """The row of the prompt's state, as if a step had just verified its last token in column 0."""
        return self.write[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotJoin:
    """A request enters a slot: everything that the device needs to know of it."""

    request_id: str
    slot: int
    length: int
    """Position of the sequence's last token."""
    last_token: int
    rows: OwnRows
    checkpoint_length: int = 0
    """Not 0: prefill left the state at this boundary in `rows.newer`, so it is the first rolling checkpoint."""
    page_ids: list[int]
    length_limit: int
    """Sequence length (tokens, emitted ones included) at which the request ends with LENGTH."""
    stop_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    prompt_ids: TokenIds
    """For the repetition penalty."""
    output_ids: TokenIds
    """Tokens generated before a preemption; penalties count them."""
    forced_output: TokenIds | None = None
    """The whole output, where it is forced; None: the target chooses."""
    constrained: bool = False
    """Windows need masks from the host: all of them, or only the first ones (`min_tokens`)."""
    logprobs: int | None = None
    """Not None: return a TokenScore for each emitted token, with that many alternatives."""


@dataclass(kw_only=True, slots=True)
class StepPlan:
    leaves: list[int] = field(default_factory=list)
    """Slots that become inert."""
    page_updates: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, block index, page id)."""
    chunks: list[ChunkPlan] = field(default_factory=list)
    joins: list[SlotJoin] = field(default_factory=list)
    first_slots: list[int] = field(default_factory=list)
    """Slots that join with this plan and take their first step: the token after the prompt, from the state that prefill
    left, and first drafts."""
    decode_slots: list[int] = field(default_factory=list)
    """Slots that verify a window; disjoint from `first_slots`."""
    num_drafted: int = 0
    """k of this step, for all its slots."""
    masks: dict[int, MaskRows] = field(default_factory=dict)
    """For each constrained slot of `first_slots` and `decode_slots`: what is allowed after column 0 and after each of
    its valid drafts. At most k + 1 rows; one in a first step. When a slot stops being constrained, it gets rows that
    allow everything once more, for all its columns: they are read whenever another slot of the batch is constrained."""

    @property
    def is_empty(self) -> bool:
        return not (self.leaves or self.page_updates or self.chunks or self.joins or self.decode_slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotOutcome:
    """One slot's part of a decode step. An inert slot (finished in an earlier step) has no emitted ids."""

    slot: int
    emitted: list[int]
    """The num_accepted accepted drafts and one more token, cut after a stop."""
    num_drafted: int
    """Drafts offered to this slot in this step: none in a first step."""
    num_accepted: int
    stop: int
    """STOP_RUNNING, STOP_ID or STOP_LENGTH, as decided on the device."""
    length: int
    """Tokens in the committed state after the step."""
    checkpoints: tuple[tuple[int, int], tuple[int, int]]
    """(row, length) of the newer and the older rolling checkpoint after the step; length 0: a spare row, no
    checkpoint."""
    matched: bool = False
    """Copies were made for the slot's next window."""
    drafts: list[int] = field(default_factory=list)
    """The drafts that were made for the next window, for a slot that joined with `constrained`."""
    scores: list[TokenScore] | None = None
    """One per emitted token, for a slot that joined with `logprobs`."""


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    slots: list[SlotOutcome] = field(default_factory=list)
    """Of `first_slots` and `decode_slots`, in any order."""
    scores: dict[str, list[TokenScore]] = field(default_factory=dict)
    """Scores of this step's chunks, by request id."""
    prefill_seconds: float = 0.0
    """Device time of the chunks, and of the windows that rode with them (0 if there were no chunks, or the executor
    doesn't measure)."""
    decode_seconds: float = 0.0
    """Device time of the decode part, without first steps (0 if there was none, or the executor doesn't measure)."""
    rode: bool = False
    """The windows' forward ran with the chunks, so `decode_seconds` covers only the rest."""


class Executor(Protocol):
    """Launches plans in order; their results are collected in the same order."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the plan; returns a ticket for `collect`. Must not wait for the device."""

    def collect(self, ticket: Any) -> StepOutcome:
        """Wait for a launched plan and return its outcome."""
