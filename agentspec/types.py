"""Types and constants that all rooms share: no torch, no behaviour beyond validation.

Inside the engine, token ids are an `array('i')`: four bytes per token, and a slice's bytes are the key of a block in
the prefix tree.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

import msgspec

from agentspec.errors import RequestError

BLOCK_TOKENS = 64
"""Tokens per block: the size of a KV page and of a Gated DeltaNet chunk. Checkpoints lie on block boundaries."""

FAIR_COST = 0.05
"""Default of `EngineConfig.fair_cost`."""

MAX_STOP_CHARACTERS = 1024
"""Maximum length of a stop string. Text that may be the beginning of one is held back."""

MAX_WINDOW = 16
"""Maximum columns of a window, for a model whose slots have rings."""

MAX_ROWS_WINDOW = 8
"""Maximum columns of a window in which each has a state row. The decode step's kernel holds such a window in registers:
compiled for Hopper, it takes 251 of 255 registers at 8 columns, and spills at 16."""

MAX_COPIES = 12
"""Most copies that a window has where their number is chosen automatically."""

MAX_WIDE_ROWS = 64
"""Most columns of all windows of a step in which windows have copies. Beyond that, dense models are bound by
arithmetic, 8-bit products round their inputs too, and logits take gigabytes."""


def widest_window(num_slots: int) -> int:
    """Most columns, in the mean, of the windows of a step of so many slots, where some have copies. Numbers of slots up
    to the next power of two count as that, as in graphs."""
    return MAX_WIDE_ROWS >> (num_slots - 1).bit_length()


def has_copies(num_slots: int, num_mtp: int) -> bool:
    """Whether windows of so many slots may have copies behind num_mtp MTP drafts."""
    return widest_window(num_slots) > num_mtp + 1


MIN_COPY_MATCH = 3
"""Fewest tokens that must occur earlier in a text for what follows them there to be drafted. A column of a dense model
costs less than 1 % of a step, so a copy that is right in one case of thirty pays for itself."""

MIN_COPY_MATCH_OF_EXPERTS = 6
"""The same where each column reads weights of its own."""

FOLD_TOKENS = 16
"""Most tokens between two states that a running request stores, if it has a ring."""

MOST_RIDERS = 128
"""Maximum number of rows (windows and padding) that decode windows add to a prefill pass. An H100 reads all weights of
a dense model in the time of about 130 (27B in FP8) to 230 (4B) more prompt tokens; with 128 more rows, one pass was
still faster than two."""

MAX_COPY_MATCH = 32
"""Tokens beyond which two matches of a copy count as equally long: then the most recent one is copied."""

ZERO_ROW = 0
"""The state row of zeros. Every new sequence reads it; it is never written."""

SCRATCH_ROW = 1
"""The state row that inactive slots and rejected columns write to. It is never read."""

NUM_SPARE_ROWS = 2
"""Spare state rows of a running request: its rolling checkpoints rotate through them."""

SCRATCH_PAGE = 0
"""The KV page that inactive slots write to. No request's page table contains it below the request's length."""


STOP_RUNNING, STOP_ID, STOP_LENGTH = range(3)
"""Codes that the device writes after a decode step: whether it ended a request, and why."""


Progress = Callable[[str, int, int], None]
"""Callback for the progress of a start: (stage, done, total). The total is 0 where it is unknown. Any thread may call
it."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A Progress that does nothing."""


def most_drafts(block_tokens: int = BLOCK_TOKENS, *, has_ring: bool = False) -> int:
    """The maximum number of drafts per step, by the size of a block.

    The windows of two steps must fit into one block: the host learns of a stop a step late, and the older of two
    rolling checkpoints must not lie beyond it."""
    return min(block_tokens // 2, MAX_WINDOW if has_ring else MAX_ROWS_WINDOW) - 1


class WindowShape(NamedTuple):
    """Columns of every window of a step: the last emitted token, then MTP drafts, then copies. Where windows share the
    rows of their forward (slots with rings), num_copies is a mean: slots with copies have what the others don't need
    (mtp/shared_rows.py)."""

    num_mtp: int
    num_copies: int = 0

    @property
    def num_drafted(self) -> int:
        """Drafts from both sources."""
        return self.num_mtp + self.num_copies

    @property
    def width(self) -> int:
        return 1 + self.num_drafted

    def most_drafts(self, most: int) -> int:
        """The most drafts that one window may have, if at most so many are made for a slot."""
        return most if self.num_copies else self.num_drafted


class SlotResult(NamedTuple):
    """What the window policy learns from one slot's window."""

    offered: int
    """Drafts in the window that were made for its prefix: MTP drafts, then copies."""
    offered_copies: int
    """Those of them that are copies."""
    accepted: int
    """Of all drafts, the first one rejected ends the count."""
    matched: bool = False
    """Copies had been made for the window, whether or not its shape had columns for them."""
    was_matched: bool = False
    """The slot counted in the `num_matched` by which the window's shape was chosen."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """Sizes of the rings in which running requests keep what their latest tokens added to the state."""

    fold_tokens: int
    """F: a state is stored where a sequence crosses a multiple of F. F divides a block, and a window has at most F
    columns, so no window crosses two multiples."""
    capacity: int
    """C: entries of a slot's ring. The entry of position p is at p % C."""

    @classmethod
    def of(cls, width: int, block_tokens: int = BLOCK_TOKENS) -> Self:
        """The smallest rings for windows of up to `width` columns.

        At the start of a step, at most F - 1 + width tokens follow the state that a slot reads; the window adds
        width."""
        fold_tokens = min(FOLD_TOKENS, block_tokens // 2)
        assert width <= fold_tokens, f"a window of {width} columns may cross two multiples of {fold_tokens}"
        return cls(fold_tokens=fold_tokens, capacity=fold_tokens + 2 * width - 1)


if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array
"""Token ids in the engine's representation. Unlike `array[int]`, this can be evaluated at runtime, which decoders of
dataclasses do."""


def tokens(ids: Iterable[int] = ()) -> array[int]:
    """Convert token ids to the engine's representation."""
    return array("i", ids)


def rows_of_request(max_draft_tokens: int, *, has_ring: bool = False) -> int:
    """Number of state rows of a running request: one for the state after each column of its window, or only one if its
    slot has a ring; and the spare rows."""
    return (1 if has_ring else max_draft_tokens + 1) + NUM_SPARE_ROWS


class CheckpointKind(enum.IntEnum):
    """Why a checkpoint lies at its offset (docs/vocabulary.md)."""

    SYSTEM = 0
    """End of system prompt and tools: shared by sessions, never superseded."""
    USER = 1
    """End of the last user message and of the tokens that open any answer: where chat templates diverge."""
    TURN = 2
    """The rolling checkpoint of the generated turn."""
    BRANCH = 3
    """An observed branching point: two requests diverged here. Never superseded."""
    GRID = 4
    """A point of a coarse grid over a long prompt without structure. Evicted first."""


BY_PROTECTION = (
    CheckpointKind.GRID,
    CheckpointKind.TURN,
    CheckpointKind.USER,
    CheckpointKind.BRANCH,
    CheckpointKind.SYSTEM,
)
"""Kinds in order of protection, the least protected first. Where two kinds fall on one boundary, the later one wins."""


class Breakpoint(msgspec.Struct, frozen=True, array_like=True):
    """A token offset where a later prompt may diverge from this one."""

    offset: int
    """Tokens from the start of the prompt; the cache rounds it down to a block boundary."""
    kind: CheckpointKind


class DraftSource(enum.StrEnum):
    """Where a draft comes from. Statistics in answers use these names."""

    MTP = "mtp"
    """The model's own MTP head."""
    COPY = "copy"
    """The session's own text, behind an earlier occurrence of its last tokens."""


class FinishReason(enum.StrEnum):
    """How a request ended. Every accepted request ends in exactly one of these."""

    STOP = "stop"
    """A stop id or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the context limit."""
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. The engine calls `validate` once, when the request is submitted."""

    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated (OpenAI's definition)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, arXiv 1909.05858)."""
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """0 to 2**63 - 1. None: the engine derives one from its own seed and the request's number."""
    max_tokens: int | None = None
    """Maximum number of new tokens; None means up to the context limit. 0 scores the prompt only."""
    min_tokens: int = 0
    """No stop id or stop string ends the output before this many tokens; one that a later token completes does."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own stop ids."""
    ignore_eos: bool = False
    """Do not stop at the model's own stop ids."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def validate(self, *, vocab_size: int) -> None:
        """Raise RequestError naming the first field that is out of range."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if not 0 <= self.top_k <= vocab_size:
            raise RequestError("top_k", self.top_k, f"must be between 0 and the vocabulary size {vocab_size}")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "must be in (0, 1]")
        _check(0.0 <= self.min_p < 1.0, "min_p", self.min_p, "must be in [0, 1)")
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check(
            0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", self.repetition_penalty, "must be in (0, 10]"
        )
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise RequestError("logit_bias", token, f"is not a token id below {vocab_size}")
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        _check(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2**63 - 1")
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "must not be negative")
        _check(0 <= self.min_tokens < 2**31, "min_tokens", self.min_tokens, "must be between 0 and 2**31 - 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"must not be more than max_tokens={self.max_tokens}")
        _check(all(self.stop), "stop", list(self.stop), "must not contain an empty string")
        _check(len(self.stop) <= 16, "stop", list(self.stop), "at most 16 stop strings")
        if any(len(text) > MAX_STOP_CHARACTERS for text in self.stop):
            raise RequestError("stop", list(self.stop), f"at most {MAX_STOP_CHARACTERS:,} characters a stop string")
        _check(len(self.stop_token_ids) <= 16, "stop_token_ids", list(self.stop_token_ids), "at most 16 ids")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise RequestError("stop_token_ids", token, f"is not a token id below {vocab_size}")


def _check(is_valid: bool, field: str, value: object, reason: str) -> None:
    if not is_valid:
        raise RequestError(field, value, reason)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(field, value, f"must be between {low:g} and {high:g}")


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token given all tokens before it, and the most likely alternatives. From the model's own
    distribution: before penalties, bias, temperature, filters and masks."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, log-probability), most likely first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes and ids of a model that the engine needs before it is loaded."""

    name: str
    vocab_size: int
    """Rows of the output head; ids at or above `num_real_tokens` are padding and never sampled."""
    num_real_tokens: int
    max_context: int
    """Tokens, prompt and output together."""
    hidden_size: int
    """Width of the residual stream."""
    has_mtp: bool
    stop_token_ids: tuple[int, ...]
    """Union of generation_config's, config's and the tokenizer's end ids."""
    row_bytes: int
    """Size of a state row over all layers: recurrent state, conv rows and the hidden column."""
    page_bytes: int
    """Size of a KV page over all attention layers and the MTP layer."""
    fp8_pages: bool = False
    """Keys and values are in 8 bits."""
    entry_bytes: int = 0
    """Size of one token's entry in a slot's ring, over all layers. 0: the model can't use rings."""
    has_experts: bool = False
    block_tokens: int = BLOCK_TOKENS
    weights: str = ""
    """How a loaded model's weights are stored, in words; of a rank its part."""

    @property
    def min_copy_match(self) -> int:
        return MIN_COPY_MATCH_OF_EXPERTS if self.has_experts else MIN_COPY_MATCH


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound (inclusive), as in Prometheus."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    """One per bound, not cumulative; the last is for values above all bounds."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.bounds = tuple(map(float, self.bounds))
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
