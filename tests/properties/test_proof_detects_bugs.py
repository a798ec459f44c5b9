"""The proof detects bugs: each bug that is planted here must make it fail, in the named check.

The planted bugs are realistic mistakes: a missing check, an off-by-one, the wrong row. A few engines with fixed seeds
are run.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.cache.checkpoints import CheckpointSet
from agentspec.cache.host_tier import HostMemory, HostTier
from agentspec.cache.hybrid_cache import HybridCache, Lease
from agentspec.cache.leases import Match
from agentspec.kernels import PrefillBatch
from agentspec.kernels.prefill_batch import OFFSET, READ_ROW
from agentspec.kernels.reference import sampling, verdict, window
from agentspec.kernels.reference.sampling import DrawInputs
from agentspec.kernels.slots import OutcomeRows, SlotState, Window
from agentspec.mtp.drafter import VerifiedWindow
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime import decode_step, executor, sampler, scheduler
from agentspec.runtime.admission import SessionGate
from agentspec.runtime.decode_step import Forward, StepResult
from agentspec.runtime.prefill_plan import plan_chunk
from agentspec.runtime.request import Phase, Request
from agentspec.runtime.scheduler import Scheduler
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.text.detokenizer import Detokenizer
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, CheckpointKind, FinishReason, tokens
from tests.fakes.hash_chain import HashChainModel
from tests.properties.engine_proof import Proof
from tests.properties.engine_setup import EngineSetup

MAX_SETUPS = 12
TURNS = 60

Patch = pytest.MonkeyPatch
ROOMY: dict[str, Any] = {
    "num_rows": 200,
    "num_pages": 400,
    "budget_share": 1.0,
    "max_running": 6,
    "prefix_cache": True,
    "extra_clients": 2,
    "bursts": False,
    "max_copies": 0,
}
STOPPING: dict[str, Any] = {
    **ROOMY,
    "stopping_share": 0.9,
    "long_outputs": True,
    "overlap": True,
    "draft_accuracy": 0.9,
    "max_draft_tokens": 5,
}
CROWDED: dict[str, Any] = {
    **ROOMY,
    "num_pages": 28,
    "max_running": 10,
    "long_outputs": True,
    "short_prompts": True,
    "hold_seconds": 0.0,
    "session_share": 0.0,
    "prefill_budget": 64,
    "overlap": True,
}
FETCHING: dict[str, Any] = {
    **ROOMY,
    "num_pages": 60,
    "num_rows": 90,
    "session_share": 0.9,
    "host": HostMemory(num_rows=60, num_pages=400, ready_share=1.0, min_fetch_blocks=1),
}
FEW_ROWS: dict[str, Any] = {**ROOMY, "max_draft_tokens": 2, "num_rows": 18, "max_running": 3}
FORMS = {"rows": False, "ring": True}
"""Whether slots have rings, by the name of the state form."""


@dataclass(frozen=True)
class Bug:
    noticed_by: str
    """Regular expression for the failure's message."""
    settings: dict[str, Any] = field(default_factory=lambda: ROOMY)
    forms: tuple[str, ...] = tuple(FORMS)
    """The state forms that have the code in which the bug is."""
    noticed_with_rings_by: str | None = None
    """Where another check comes first with rings."""


def publishes_beyond_the_stop(patch: Patch) -> None:
    """The newer rolling checkpoint is published even if some of its tokens weren't kept."""

    def publish_rolling(self: Any, request: Request) -> None:
        done = [(length, row) for row, length in request.rolling if length]
        if done:
            length, row = max(done)
            self.cache.publish(
                request.lease, request.submit.namespace, request.sequence, length, row, CheckpointKind.TURN
            )

    patch.setattr(Scheduler, "_publish_rolling", publish_rolling)


def publishes_one_block_deeper(patch: Patch) -> None:
    """The older row is published under the length of the newer one."""
    original = Scheduler._publish_rolling

    def publish_rolling(self: Any, request: Request) -> None:
        if request.rolling:
            (_, newer_length), (older_row, older_length) = request.rolling
            request.rolling = ((older_row, newer_length), (older_row, older_length))
        original(self, request)

    patch.setattr(Scheduler, "_publish_rolling", publish_rolling)


def publishes_the_newer_row_as_the_older(patch: Patch) -> None:
    original = Scheduler._publish_rolling

    def publish_rolling(self: Any, request: Request) -> None:
        if request.rolling:
            (newer_row, newer_length), (_, older_length) = request.rolling
            request.rolling = ((newer_row, newer_length), (newer_row, older_length))
        original(self, request)

    patch.setattr(Scheduler, "_publish_rolling", publish_rolling)


def publishes_no_turn(patch: Patch) -> None:
    patch.setattr(Scheduler, "_publish_rolling", lambda self, request: None)


def publishes_prefill_at_launch(patch: Patch) -> None:
    original = Scheduler._launch_chunk

    def launch_chunk(self: Any, flight: Any, request: Request, chunk: Any, checkpoints: list[Any]) -> None:
        original(self, flight, request, chunk, [])
        self._publish_prefill(request, checkpoints)

    patch.setattr(Scheduler, "_launch_chunk", launch_chunk)


def releases_request_in_flight(patch: Patch) -> None:
    """A stop string, which only the host detects, is treated like a stop that the device detected."""
    original = Scheduler._end

    def end(self: Any, request: Request, reason: FinishReason, *, device_inert: bool = False) -> None:
        original(self, request, reason, device_inert=device_inert or reason is FinishReason.STOP)

    patch.setattr(Scheduler, "_end", end)


def retracts_a_request_in_flight(patch: Patch) -> None:
    def retract(self: Any, request: Request) -> None:
        request.preemptions += 1
        self._let_go(request)

    patch.setattr(Scheduler, "_retract", retract)


def loses_the_tokens_of_the_step_in_flight(patch: Patch) -> None:
    """The tokens that a retracted request emitted in its last step are dropped, to be computed again."""
    original = Request.take_outcome

    def take(self: Any, outcome: Any) -> Any:
        return None if self.phase is Phase.LEAVING else original(self, outcome)

    patch.setattr(Request, "take_outcome", take)


def does_not_lock_the_resumed_row(patch: Patch) -> None:
    def advance(self: Any, lease: Lease, checkpoint: Any) -> None:
        self._move_anchor(lease, checkpoint.node)
        lease.deepest = checkpoint

    patch.setattr(HybridCache, "_advance", advance)


def supersedes_a_row_that_others_read(patch: Patch) -> None:
    def supersede(self: Any, checkpoint: Any) -> None:
        if checkpoint.num_locks:
            self._rows.free((checkpoint.row,))
        else:
            self._drop(checkpoint)

    patch.setattr(CheckpointSet, "supersede", supersede)


def forgets_to_free_superseded_rows(patch: Patch) -> None:
    original = CheckpointSet._drop

    def drop(self: Any, checkpoint: Any) -> None:
        free, self._rows.free = self._rows.free, lambda rows: None
        original(self, checkpoint)
        self._rows.free = free

    patch.setattr(CheckpointSet, "_drop", drop)


def matches_any_namespace(patch: Patch) -> None:
    """In both match and publish, so that the tree itself is consistent."""
    match, publish = HybridCache.match, HybridCache.publish
    patch.setattr(HybridCache, "match", lambda self, namespace, *rest, **keywords: match(self, "", *rest, **keywords))
    patch.setattr(HybridCache, "publish", lambda self, lease, namespace, *rest: publish(self, lease, "", *rest))


def admits_without_its_namespace(patch: Patch) -> None:
    original = Scheduler._admit

    def admit(self: Any) -> None:
        match = self.cache.match
        self.cache.match = lambda namespace, *rest, **keywords: match("", *rest, **keywords)
        original(self)
        self.cache.match = match

    patch.setattr(Scheduler, "_admit", admit)


def matches_an_evicted_row(patch: Patch) -> None:
    """The pages are still there for a deeper checkpoint, and the row is assumed to be too."""
    drop, match = CheckpointSet._drop, HybridCache.match
    graves: dict[Any, Any] = {}

    def remember(self: Any, checkpoint: Any) -> None:
        drop(self, checkpoint)
        graves[checkpoint.node] = checkpoint

    def revive(self: Any, namespace: str, sequence: array[int], **keywords: Any) -> Match:
        found = match(self, namespace, sequence, **keywords)
        path, _, _ = self.tree.walk(namespace, sequence[: found.branch_tokens].tobytes())
        for node in path:
            if (
                node in graves
                and node.page_ids is not None
                and node.checkpoint is None
                and node.depth > found.num_tokens
            ):
                graves[node].alive = True
                found = replace(
                    found, num_tokens=node.depth, row=graves[node].row, kind=graves[node].kind, checkpoint=graves[node]
                )
        return found

    patch.setattr(CheckpointSet, "_drop", remember)
    patch.setattr(HybridCache, "match", revive)


def matches_one_block_too_deep(patch: Patch) -> None:
    original = HybridCache.match

    def match(self: Any, namespace: str, sequence: array[int], *, limit: int | None = None) -> Match:
        found = original(self, namespace, sequence, limit=limit)
        return replace(found, num_tokens=found.num_tokens + 16) if found.branch_tokens > found.num_tokens > 0 else found

    patch.setattr(HybridCache, "match", match)


def misplaces_states(patch: Patch) -> None:
    """A chunk writes the states of its checkpoints one token early."""

    def early(request: Request, *rest: Any) -> Any:
        chunk, checkpoints = plan_chunk(request, *rest)
        if chunk is None:
            return chunk, checkpoints
        *inner, last = chunk.state_writes
        return replace(chunk, state_writes=(*((count - 1, row) for count, row in inner), last)), checkpoints

    patch.setattr(scheduler, "plan_chunk", early)


def skips_mtp_prefill(patch: Patch) -> None:
    patch.setattr(HashChainModel, "mtp_prefill", lambda self, batch, previous_NH: None)


def shifts_mtp_pairs(patch: Patch) -> None:
    """Prefill pairs each token with its own hidden instead of the previous token's."""
    original = HashChainModel.mtp_prefill

    def mtp_prefill(self: Any, batch: PrefillBatch, previous_NH: Tensor) -> None:
        original(self, batch, previous_NH.roll(-1, 0))

    patch.setattr(HashChainModel, "mtp_prefill", mtp_prefill)


def reads_the_hidden_after_prefill(patch: Patch) -> None:
    """By then a chunk may have overwritten the row that it resumed from."""
    original = HashChainModel.mtp_prefill

    def mtp_prefill(self: Any, batch: PrefillBatch, previous_NH: Tensor) -> None:
        now_UH = self.read_hidden(batch.spans_UF[:, READ_ROW])
        original(self, batch, previous_NH.index_copy(0, batch.spans_UF[:, OFFSET], now_UH))

    patch.setattr(HashChainModel, "mtp_prefill", mtp_prefill)


def writes_mtp_pairs_one_position_early(patch: Patch) -> None:
    """As in engines that index MTP K/V by its hidden."""
    original = MtpDrafter.draft

    def draft(self: Any, window: VerifiedWindow, num_drafted: int) -> Tensor:
        return original(self, replace(window, start_B=window.start_B - 1), num_drafted)

    patch.setattr(MtpDrafter, "draft", draft)


def never_rotates_checkpoints(patch: Patch) -> None:
    def keep(slot: SlotState[Tensor], length_B: Tensor, block_tokens: int) -> Any:
        return slot.write_rows_BW, slot.checkpoint_rows_B2, slot.checkpoint_lens_B2

    patch.setattr(window, "rotate_checkpoints", keep)


def rotates_the_next_column(patch: Patch) -> None:
    original = window.rotate_checkpoints

    def rotate(slot: SlotState[Tensor], length_B: Tensor, block_tokens: int) -> Any:
        rolled = SlotState.of(slot.rows_BF.clone())
        rolled.write_rows_BW.copy_(slot.write_rows_BW.roll(1, 1))
        return original(rolled, length_B, block_tokens)

    patch.setattr(window, "rotate_checkpoints", rotate)


def frees_the_newer_checkpoint(patch: Patch) -> None:
    """Rotation gives the row of the newer checkpoint, instead of the older, to the write rows."""
    original = window.rotate_checkpoints

    def rotate(slot: SlotState[Tensor], length_B: Tensor, block_tokens: int) -> Any:
        write_rows, rows, lens = original(slot, length_B, block_tokens)
        crossed = (rows[:, :1] != slot.checkpoint_rows_B2[:, :1]).expand_as(write_rows)
        older, newer = slot.checkpoint_rows_B2[:, 1:], slot.checkpoint_rows_B2[:, :1]
        return torch.where(crossed & (write_rows == older), newer, write_rows), rows, lens

    patch.setattr(window, "rotate_checkpoints", rotate)


def _replace_forward(patch: Patch, real: Forward, taken: Forward) -> None:
    """Steps of one kind are treated as steps of another kind."""
    original = decode_step.decode_step

    def step(*arguments: Any, forward: Forward, **keywords: Any) -> StepResult:
        return original(*arguments, forward=taken if forward is real else forward, **keywords)

    patch.setattr(executor, "decode_step", step)


def verifies_the_prompts_last_token_again(patch: Patch) -> None:
    """A first step runs like any other: its forward adds a token that the state already contains."""
    _replace_forward(patch, Forward.PREFILLED, Forward.RUN)


def leaves_out_the_prompts_last_token(patch: Patch) -> None:
    """The state that a request joins with lacks the last token."""

    def early(request: Request, *rest: Any) -> Any:
        chunk, checkpoints = plan_chunk(request, *rest)
        if chunk is None or chunk.next_token is not None or len(chunk.token_ids) < 2:
            return chunk, checkpoints
        count, row = chunk.state_writes[-1]
        inner = tuple(write for write in chunk.state_writes[:-1] if write[0] < count - 1)
        return replace(chunk, state_writes=(*inner, (count - 1, row), (count, SCRATCH_ROW))), checkpoints

    patch.setattr(scheduler, "plan_chunk", early)


def lets_inert_slots_write(patch: Patch) -> None:
    """The rows of an ended slot are not replaced by the scratch row."""
    original = decode_step.open_windows

    def open_windows(buffers: StepBuffers, slot_ids_B: Tensor, num_drafted: int) -> Window:
        rows = SlotState.of(buffers.slots_SF[slot_ids_B]).write_rows_BW[:, : num_drafted + 1]
        return replace(original(buffers, slot_ids_B, num_drafted), write_rows_BT=rows)

    for module in (decode_step, executor):
        patch.setattr(module, "open_windows", open_windows)


def verifies_again_after_a_ride(patch: Patch) -> None:
    """The window's forward runs twice, and may read a row that it has already written."""
    _replace_forward(patch, Forward.RIDDEN, Forward.RUN)


def takes_the_first_column_for_all_after_a_ride(patch: Patch) -> None:
    """As in a first step, which has only one column."""
    _replace_forward(patch, Forward.RIDDEN, Forward.PREFILLED)


def rides_before_new_pages_are_known(patch: Patch) -> None:
    """Riding windows use the page tables from before the plan."""
    launch, update = executor.ModelExecutor.launch, StepBuffers.update_pages

    def late(self: Any, plan: Any) -> Any:
        if not self._rides(plan):
            return launch(self, plan)
        ticket = launch(self, replace(plan, page_updates=[]))
        if plan.page_updates:
            with torch.inference_mode():
                update(self._buffers, plan.page_updates)
        return ticket

    patch.setattr(executor.ModelExecutor, "launch", late)


def leaves_the_slots_old_pages(patch: Patch) -> None:
    original = StepBuffers.join

    def join(self: Any, joins: Any) -> None:
        slots = torch.tensor([join.slot for join in joins])
        before = self.page_table_SP[slots]
        original(self, joins)
        self.page_table_SP[slots] = torch.where(before != SCRATCH_PAGE, before, self.page_table_SP[slots])

    patch.setattr(StepBuffers, "join", join)


def forgets_new_pages(patch: Patch) -> None:
    patch.setattr(StepBuffers, "update_pages", lambda self, updates: None)


def accepts_one_draft_too_many(patch: Patch) -> None:
    def count(chosen_BT: Tensor, drafts_Bk: Tensor, num_valid_B: Tensor) -> Tensor:
        return torch.minimum(verdict.count_matches(chosen_BT, drafts_Bk, num_valid_B) + 1, num_valid_B)

    patch.setattr(window, "count_matches", count)


def exceeds_the_limit(patch: Patch) -> None:
    original = verdict.truncate

    def truncate(tokens_BT: Tensor, num_matched_B: Tensor, stop_ids_BE: Tensor, room_B: Tensor) -> Any:
        return original(tokens_BT, num_matched_B, stop_ids_BE, room_B + 1)

    patch.setattr(window, "truncate", truncate)


def overlooks_a_stop_id_inside_a_window(patch: Patch) -> None:
    original = verdict.truncate

    def truncate(tokens_BT: Tensor, num_matched_B: Tensor, *rest: Any) -> Any:
        is_inner = torch.arange(tokens_BT.shape[1]) < num_matched_B[:, None]
        return original(torch.where(is_inner, -2, tokens_BT), num_matched_B, *rest)

    patch.setattr(window, "truncate", truncate)


def penalties_overlook_drafts(patch: Patch) -> None:
    original = sampling.penalise
    patch.setattr(
        sampling,
        "penalise",
        lambda logits_BTV, drafts_Bk, inputs: original(logits_BTV, torch.full_like(drafts_Bk, 51), inputs),
    )


def penalties_count_rejected_drafts(patch: Patch) -> None:
    original = sampler.count_emitted

    def count(counts_SV: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor) -> None:
        whole_BF = outcome_BF.clone()
        OutcomeRows.of(whole_BF).num_emitted_B.fill_(whole_BF.shape[1])
        original(counts_SV, slot_ids_B, whole_BF)

    patch.setattr(decode_step, "count_emitted", count)


def penalties_forget_what_came_before_preemption(patch: Patch) -> None:
    original = Request.join_slot
    patch.setattr(Request, "join_slot", lambda self: replace(original(self), output_ids=tokens()))


def seeds_by_batch_position(patch: Patch) -> None:
    original = sampling.draw

    def draw(logits_BTV: Tensor, position_BT: Tensor, inputs: DrawInputs) -> Tensor:
        return original(logits_BTV, torch.arange(len(position_BT))[:, None].expand_as(position_BT), inputs)

    patch.setattr(sampling, "draw", draw)


def keeps_tokens_after_a_stop_string(patch: Patch) -> None:
    original = Detokenizer.push
    patch.setattr(Detokenizer, "push", lambda self, ids: original(self, ids)._replace(num_tokens=len(ids)))


def finishes_twice(patch: Patch) -> None:
    original = Scheduler._finish

    def finish(self: Any, request: Request) -> None:
        original(self, request)
        self._events.append(self._events[-1])

    patch.setattr(Scheduler, "_finish", finish)


def drops_an_abort_while_waiting(patch: Patch) -> None:
    """The request leaves the queue without a terminal event."""
    original = Scheduler._finish

    def finish(self: Any, request: Request) -> None:
        if request.counted_cached:
            original(self, request)
        else:
            self._fair.leave(request)

    patch.setattr(Scheduler, "_finish", finish)


def counts_cached_tokens_at_every_admission(patch: Patch) -> None:
    original = Scheduler._enter

    def enter(self: Any, request: Request) -> None:
        request.counted_cached = False
        original(self, request)

    patch.setattr(Scheduler, "_enter", enter)


def scores_twice_after_preemption(patch: Patch) -> None:
    original = Scheduler._enter

    def enter(self: Any, request: Request) -> None:
        scores = list(request.scores)
        original(self, request)
        request.scores = scores

    patch.setattr(Scheduler, "_enter", enter)


def leaves_session_at_gate(patch: Patch) -> None:
    patch.setattr(SessionGate, "withdraw", lambda self, session_id: None)


def exceeds_byte_budget(patch: Patch) -> None:
    original = HybridCache._make_room

    def make_room(self: Any, lease: Lease, **needed: int) -> bool:
        budget, self.budget_bytes = self.budget_bytes, 2**40
        has_room = original(self, lease, **needed)
        self.budget_bytes = budget
        return has_room

    patch.setattr(HybridCache, "_make_room", make_room)


def keeps_ownership_of_published_pages(patch: Patch) -> None:
    """The tree takes the lease's pages, and the lease still owns them."""
    original = HybridCache._fill_ghosts

    def fill(self: Any, lease: Lease, path: Any) -> None:
        owned = set(lease.own_pages)
        original(self, lease, path)
        lease.own_pages = owned

    patch.setattr(HybridCache, "_fill_ghosts", fill)


def resumes_before_fetch_completes(patch: Patch) -> None:
    original = Scheduler.copied
    patch.setattr(Scheduler, "copied", lambda self, to_host, to_device: original(self, to_host, 1 << 60))


def trusts_copies_that_are_not_complete(patch: Patch) -> None:
    patch.setattr(HostTier, "is_complete", lambda self, copy: True)


def fetches_one_page_too_few(patch: Patch) -> None:
    original = HostTier.fetch
    patch.setattr(HostTier, "fetch", lambda self, copy, row, page_ids: original(self, copy, row, page_ids[1:]))


BUGS: dict[Callable[[Patch], None], Bug] = {
    publishes_beyond_the_stop: Bug("published [0-9]+ tokens of [0-9]+ kept ones", STOPPING),
    publishes_one_block_deeper: Bug("published TURN"),
    publishes_the_newer_row_as_the_older: Bug("published TURN", STOPPING),
    publishes_no_turn: Bug("the deepest remaining state"),
    publishes_prefill_at_launch: Bug("published .* row"),
    releases_request_in_flight: Bug(
        "lease doesn't own|lease that was released",
        STOPPING,
        noticed_with_rings_by="lease that was released|which its lease neither owns nor locks",
    ),
    retracts_a_request_in_flight: Bug("still has its lease|a running fetch would write to freed ids", CROWDED),
    loses_the_tokens_of_the_step_in_flight: Bug("tokens of the device are lost", CROWDED),
    does_not_lock_the_resumed_row: Bug("neither owns nor locks", FEW_ROWS),
    supersedes_a_row_that_others_read: Bug("", STOPPING),
    forgets_to_free_superseded_rows: Bug("no owner"),
    matches_any_namespace: Bug("never published"),
    admits_without_its_namespace: Bug("looked up in namespace"),
    matches_an_evicted_row: Bug("resumed row|live checkpoints have locks", FEW_ROWS),
    matches_one_block_too_deep: Bug(""),
    misplaces_states: Bug("is not the state after"),
    skips_mtp_prefill: Bug("MTP"),
    shifts_mtp_pairs: Bug("MTP"),
    reads_the_hidden_after_prefill: Bug("MTP", {**ROOMY, "prefill_budget": 64}),
    writes_mtp_pairs_one_position_early: Bug("MTP|page"),
    never_rotates_checkpoints: Bug("the deepest remaining state", forms=("rows",)),
    rotates_the_next_column: Bug("", forms=("rows",)),
    frees_the_newer_checkpoint: Bug("", forms=("rows",)),
    verifies_the_prompts_last_token_again: Bug("windows of a step"),
    leaves_out_the_prompts_last_token: Bug(""),
    verifies_again_after_a_ride: Bug(""),
    takes_the_first_column_for_all_after_a_ride: Bug("stream|published"),
    rides_before_new_pages_are_known: Bug(""),
    lets_inert_slots_write: Bug("lease that was released|lease doesn't own", {**ROOMY, "overlap": True}, ("rows",)),
    leaves_the_slots_old_pages: Bug(""),
    forgets_new_pages: Bug(""),
    accepts_one_draft_too_many: Bug("stream|published TURN"),
    exceeds_the_limit: Bug("stream"),
    overlooks_a_stop_id_inside_a_window: Bug("stream"),
    penalties_overlook_drafts: Bug("stream"),
    penalties_count_rejected_drafts: Bug("stream"),
    penalties_forget_what_came_before_preemption: Bug("stream", {**CROWDED, "sampled_share": 1.0}),
    seeds_by_batch_position: Bug("stream"),
    keeps_tokens_after_a_stop_string: Bug("stream", STOPPING),
    finishes_twice: Bug("terminal event"),
    drops_an_abort_while_waiting: Bug("stuck"),
    counts_cached_tokens_at_every_admission: Bug("cached tokens", CROWDED),
    scores_twice_after_preemption: Bug("scores for", {**CROWDED, "scoring_share": 0.5}),
    leaves_session_at_gate: Bug("the gate counts"),
    exceeds_byte_budget: Bug("bytes in use", {"budget_share": 0.6}),
    keeps_ownership_of_published_pages: Bug("resumed pages|fetched pages"),
    resumes_before_fetch_completes: Bug("fetched row", FETCHING),
    trusts_copies_that_are_not_complete: Bug("fetched (row|pages)|an incomplete copy", FETCHING),
    fetches_one_page_too_few: Bug("fetched pages", FETCHING),
}


@pytest.mark.parametrize(
    ("plant", "form"),
    [pytest.param(plant, form, id=f"{plant.__name__}-{form}") for plant, bug in BUGS.items() for form in bug.forms],
)
def test_proof_detects_planted_bug(plant: Callable[[Patch], None], form: str, monkeypatch: Patch) -> None:
    bug = BUGS[plant]
    plant(monkeypatch)
    failure = first_failure(bug.settings | {"has_ring": FORMS[form]})
    assert failure is not None, f"{MAX_SETUPS} setups noticed nothing"
    pattern = bug.noticed_with_rings_by if FORMS[form] and bug.noticed_with_rings_by else bug.noticed_by
    assert re.search(pattern, str(failure)), f"noticed by something else: {failure}"


def first_failure(settings: dict[str, Any]) -> AssertionError | None:
    for seed in range(MAX_SETUPS):
        try:
            Proof(replace(EngineSetup.random(seed), **settings)).run(TURNS)
        except AssertionError as failure:
            return failure
    return None
