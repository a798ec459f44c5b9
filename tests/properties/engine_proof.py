"""The engine's randomised proof, as a program: random engines, random clients, and the checks on every turn.

The device is real (decode_step, prefill, buffers), the model is the hash chain: any wrong row, stale page or early
publish changes its output. `Proof` checks

- every state when it is published, when a request resumes from it or fetches it from the host tier, and at the end: it
  equals a from-scratch prefill of its key, and was published in the same namespace;
- every stream: it equals the same request run alone, with no cache and no drafts, and no token emitted by the device is
  lost;
- every request: exactly one terminal event, in finite time, with correct usage, text and scores;
- every end of a request: the deepest boundary that the kept tokens reached has a state (with rings: those before the
  last step);
- drafts of a perfect drafter: all are accepted, whatever was cached, resumed or preempted before;
- every write: only to rows and pages that the writer owns; every read row is owned or locked (watched_device.py), on a
  device that may run behind the host;
- accounting: the cache's invariants during the run, and no leaks after it.

    python -m tests.properties.engine_proof --seed 7 --turns 60

runs one random engine and prints how often each path was taken.
"""

from __future__ import annotations

import argparse
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentspec.cache import invariants
from agentspec.cache.leases import Lease, Match
from agentspec.cache.prefix_tree import Checkpoint, path_of
from agentspec.engine.ranks import Ranks
from agentspec.mtp.copies import draft_copies
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.plan import SlotOutcome
from agentspec.runtime.ranks.leader import LedExecutor
from agentspec.runtime.request import Phase, Request, new_request
from agentspec.types import STOP_ID, STOP_LENGTH, STOP_RUNNING, CheckpointKind, FinishReason, tokens
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent
from tests.fakes.automaton import Automaton
from tests.fakes.hash_chain import ReferenceRequest
from tests.properties.clients import TOKEN_BYTES, TOKEN_TEXT, Clients, Turn
from tests.properties.engine_setup import BLOCK, EngineSetup
from tests.properties.late_copies import LateCopies
from tests.properties.watched_device import WatchedDevice

PATIENCE = 1000
"""Loop iterations without any event after which the engine counts as stuck."""


class Proof:
    """Runs one engine until `num_turns` turns have ended, and checks everything."""

    def __init__(
        self,
        setup: EngineSetup,
        device: torch.device | None = None,
        *,
        graphs: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        """device: None: the CPU. graphs: on CUDA, replay steps; then the writes to rows and pages aren't watched, only
        their results are checked. ranks: other processes, which run the same plans on models of their own."""
        device = torch.device("cpu") if device is None else device
        self.setup = setup
        self.rng = random.Random(setup.seed)
        self.now = 0.0
        self.model = setup.new_model(device)
        self.assembly = setup.build(self.model, lambda: self.now, device, graphs=graphs, ranks=ranks)
        self.cache = self.assembly.cache
        self.loop: Any = self.assembly.loop
        self.max_length = self.assembly.info.max_context
        self.clients = Clients(setup, self.rng, num_tokens=self.model.spec.num_real_tokens, max_length=self.max_length)
        self.running: dict[str, Turn] = {}
        self.ended: list[tuple[Turn, FinishEvent]] = []
        self.paths: Counter[str] = Counter()
        """How often each path of interest was taken."""
        self._published: set[tuple[str, bytes]] = set()
        self._match = self.cache.match
        self._spy_on_cache()
        self._spy_on_admission()
        if self.assembly.copies is not None:
            self.loop._copier = LateCopies(self.assembly.copies, random.Random(setup.seed), is_slow=setup.slow_copies)
        executor = self.loop.executor
        assert isinstance(executor, ModelExecutor | LedExecutor)
        self.loop.executor = self.device = WatchedDevice(
            executor,
            self.model,
            self.cache,
            lateness=random.Random(setup.seed) if setup.overlap and setup.late_device else None,
            times=random.Random(f"times {setup.seed}"),
            requests=lambda: [turn.request for turn in self.running.values()],
            on_outcome=self._note_outcome,
            paths=self.paths,
        )

    def run(self, num_turns: int) -> None:
        """Run and check. Raises AssertionError, with the command that reproduces it."""
        try:
            with self.setup.constants():
                self._run(num_turns)
        except Exception as error:
            error.add_note(
                f"{self.setup}\nreproduce: python -m tests.properties.engine_proof "
                f"--seed {self.setup.seed} --turns {num_turns}"
            )
            raise

    def _run(self, num_turns: int) -> None:
        num_quiet = 0
        while len(self.ended) < num_turns or self.running:
            self._submit_some(num_turns - len(self.ended) - len(self.running))
            self._abort_some()
            self.now += self.rng.choice([0.0, 0.01, 0.1, 1.0, 5.0])
            before = [
                (turn.request, turn.request.phase, turn.request.in_flight, turn.request.preemptions)
                for turn in self.running.values()
            ]
            events = self.loop.run_once()
            for event in events:
                self._take(event)
            self._note_preemptions(before)
            num_quiet = 0 if events else num_quiet + 1
            assert num_quiet < PATIENCE, (
                f"stuck: {[(turn.request.request_id, turn.request.phase.name) for turn in self.running.values()]}"
            )
            if self.rng.random() < 0.05:
                invariants.check(self.cache)
        while self.loop.has_work:
            assert not self.loop.run_once(), "an event after the last terminal event"
        self._check_streams()
        self._check_live_states()
        self._check_accounting()

    def _submit_some(self, num_left: int) -> None:
        if self.setup.bursts and self.running:
            return
        for _ in range(min(num_left, self.setup.concurrency - len(self.running))):
            session, asked = self.clients.next_submit()
            submit, constraint = self.extend_submit(asked)
            request = new_request(
                submit,
                number=len(self.ended) + len(self.running),
                spec=self.model.spec,
                max_length=self.max_length,
                engine_seed=7,
                token_bytes=TOKEN_BYTES,
                constraint=constraint,
            )
            turn = Turn(session, request, submit, constraint)
            if self.rng.random() < 0.12:
                turn.abort_after = self.rng.choice([self.rng.randrange(6), self.rng.randrange(40)])
            self.running[submit.request_id] = turn
            self.loop.submit(request)

    def extend_submit(self, submit: Submit) -> tuple[Submit, Automaton | None]:
        """Hook for proofs that add more to a submit."""
        return submit, None

    def _abort_some(self) -> None:
        for turn in self.running.values():
            if turn.abort_after is not None:
                turn.abort_after -= 1
            gives_up = turn.abort_after is not None and turn.abort_after < 0
            if turn.aborted:
                self.loop.abort(turn.submit.request_id)  # a second abort has no effect
            elif gives_up or (turn.request.phase is Phase.LEAVING and self.rng.random() < 0.1):
                turn.aborted = True
                has_ended = turn.request.ending is not None
                self.paths["abort after the end" if has_ended else f"abort in {turn.request.phase.name}"] += 1
                self.loop.abort(turn.submit.request_id)

    def _take(self, event: Event) -> None:
        assert event.request_id in self.running, f"{event} after its request's terminal event"
        turn = self.running[event.request_id]
        turn.text += event.text
        if isinstance(event, TokensEvent):
            assert event.token_ids, "an empty event"
            turn.emitted.extend(event.token_ids)
            return
        del self.running[event.request_id]
        self.clients.end(turn)
        self.ended.append((turn, event))

    def _spy_on_cache(self) -> None:
        """Check states at publish, at resume and at the end."""
        cache: Any = self.cache
        match, acquire, publish = cache.match, cache.acquire, cache.publish
        release, finish_fetch = cache.release, cache.finish_fetch
        replace, supersede = cache.tree.replace_pages, cache.checkpoints.supersede
        looked_up: list[Turn] = []

        def spy_match(namespace: str, sequence: array[int], **keywords: Any) -> Match:
            turn = self._turn_of(sequence)
            looked_up[:] = [turn]
            assert namespace == turn.submit.namespace, f"looked up in namespace {namespace!r}"
            found: Match = match(namespace, sequence, **keywords)
            return found

        def spy_acquire(found: Match, **keywords: Any) -> Lease:
            lease: Lease = acquire(found, **keywords)
            self._check_resumed(looked_up[0], lease, found)
            return lease

        def spy_publish(
            lease: Lease, namespace: str, sequence: array[int], length: int, row: int, kind: CheckpointKind
        ) -> bool:
            turn = self._turn_of(sequence)
            assert turn.request.lease is lease, "published with another's lease"
            assert namespace == turn.submit.namespace, f"published in namespace {namespace!r}"
            assert length <= len(sequence), f"published {length} tokens of {len(sequence)} kept ones"
            self._check_state(row, lease.page_ids, sequence[:length], f"published {kind.name}")
            taken: bool = publish(lease, namespace, sequence, length, row, kind)
            self._published.add((namespace, sequence[:length].tobytes()))
            self.paths["published before a launched step ran"] += self.device.is_behind
            self.paths["published BRANCH"] += kind is CheckpointKind.BRANCH
            self.paths["published GRID"] += kind is CheckpointKind.GRID
            self.paths["published existing checkpoint"] += cache.enabled and not taken
            self.paths["older rolling checkpoint published"] += any(
                beyond > len(sequence) for _, beyond in turn.request.rolling
            )
            return taken

        def spy_finish_fetch(lease: Lease, namespace: str, sequence: array[int]) -> None:
            turn = self._turn_of(sequence)
            assert turn.request.lease is lease, "fetched for another request's lease"
            assert lease.fetch is not None
            stood = self._match(namespace, sequence).num_tokens >= lease.fetch.num_tokens
            finish_fetch(lease, namespace, sequence)
            key = sequence[: lease.num_cached]
            assert (turn.submit.namespace, key.tobytes()) in self._published, (
                f"fetched {len(key)} tokens that were never published in its namespace"
            )
            self._check_state(lease.read_row, lease.page_ids, key, "fetched")
            self.paths["fetched"] += 1
            self.paths["fetched state that was published again"] += stood
            self.paths["fetched after preemption"] += turn.request.preemptions > 0
            self.paths["fetched for ended request"] += turn.request.phase is Phase.LEAVING

        def spy_release(lease: Lease, **keywords: Any) -> None:
            turn = next((turn for turn in self.running.values() if turn.request.lease is lease), None)
            if turn is None:
                self.paths["no room"] += 1
            else:
                self._check_released(turn, lease)
            release(lease, **keywords)
            self.paths["hold"] += lease.session_id in cache.checkpoints.holds

        def spy_replace(*arguments: Any) -> None:
            self.paths["duplicate pages adopted"] += 1
            replace(*arguments)

        def spy_supersede(checkpoint: Checkpoint) -> None:
            self.paths["superseded while locked"] += checkpoint.num_locks > 0
            supersede(checkpoint)

        cache.match, cache.acquire, cache.publish, cache.release, cache.finish_fetch = (
            spy_match,
            spy_acquire,
            spy_publish,
            spy_release,
            spy_finish_fetch,
        )
        cache.tree.replace_pages, cache.checkpoints.supersede = spy_replace, spy_supersede

    def _spy_on_admission(self) -> None:
        """Count why requests wait."""
        scheduler = self.loop.scheduler
        soon_cached, allows = scheduler._soon_cached, scheduler._gate.allows

        def spy_soon_cached(*arguments: Any) -> bool:
            waits: bool = soon_cached(*arguments)
            self.paths["waited for a promised prefix"] += waits
            return waits

        def spy_allows(*arguments: Any) -> bool:
            allowed: bool = allows(*arguments)
            self.paths["blocked by the session gate"] += not allowed
            return allowed

        scheduler._soon_cached, scheduler._gate.allows = spy_soon_cached, spy_allows

    def _turn_of(self, sequence: array[int]) -> Turn:
        return next(turn for turn in self.running.values() if turn.request.sequence is sequence)

    def _check_resumed(self, turn: Turn, lease: Lease, found: Match) -> None:
        if not lease.num_cached:
            return
        key = turn.request.sequence[: lease.num_cached]
        assert (turn.submit.namespace, key.tobytes()) in self._published, (
            f"resumed from {len(key)} tokens that were never published in its namespace"
        )
        self._check_state(lease.read_row, lease.page_ids, key, "resumed")
        assert found.kind is not None
        self.paths[f"hit {found.kind.name}"] += 1
        self.paths["hit after preemption"] += turn.request.preemptions > 0

    def _check_state(self, row: int, page_ids: list[int], key: array[int], what: str) -> None:
        self.model.check_row(row, key, context=what)
        self.model.check_pages(
            page_ids[: len(key) // BLOCK], key, with_mtp=self.setup.max_draft_tokens > 0, context=what
        )

    def _check_released(self, turn: Turn, lease: Lease) -> None:
        """Check that a released request left a state for the next turn: at the last boundary that its decode steps
        crossed. With a ring: that its tokens had reached before its last step."""
        request = turn.request
        if turn.cached is None:
            turn.cached = lease.num_cached
        self.paths["released while inert in a step in flight"] += request.in_flight > 0
        reached = turn.length_before if self.setup.has_ring else len(request.sequence) - 1
        boundary = reached // BLOCK * BLOCK
        is_wanted = request.turn_trusted or request.ending is None
        self.paths["ended untrusted"] += not is_wanted
        if is_wanted and request.rolling and boundary >= request.computed and self.cache.enabled:
            found = self._match(turn.submit.namespace, request.sequence, limit=len(request.sequence)).num_tokens
            assert found >= boundary, (
                f"{len(request.sequence)} tokens were kept, but the deepest remaining state has {found}"
            )

    def _note_outcome(self, request: Request, slot: SlotOutcome, made: list[int], looked: bool) -> None:
        if request.ending is not None or not slot.emitted:
            return
        turn = self.running[request.request_id]
        turn.length_before = len(request.sequence) - 1
        num_accepted = slot.num_accepted if request.dead_end is None else min(slot.num_accepted, request.dead_end)
        if request.takes_first_step:
            assert (len(slot.emitted), slot.num_drafted) == (1, 0), "a first step emits one token"
            turn.num_first_steps += 1
            self.paths["first step"] += 1
            self.paths["first step onto a boundary"] += slot.length % BLOCK == 0
        else:
            turn.steps.append((len(slot.emitted), slot.num_drafted, num_accepted))
        self._check_copies(request, slot, made, looked)
        cut = slot.num_accepted < slot.num_drafted
        self.paths["stop id"] += slot.stop == STOP_ID
        self.paths["stop id inside a window"] += slot.stop == STOP_ID and cut and slot.num_accepted > 0
        self.paths["length limit inside a window"] += slot.stop == STOP_LENGTH and cut and slot.num_accepted > 0

    def _check_copies(self, request: Request, slot: SlotOutcome, made: list[int], looked: bool) -> None:
        """Check the copies made in every eighth step against the rule, which takes long in plain Python. looked:
        whether the step looks for copies."""
        num_mtp, most = self.setup.max_draft_tokens, self.setup.max_copies
        self.paths["copy accepted"] += max(0, slot.num_accepted - num_mtp)
        self.paths["copies not looked for"] += most > 0 and not looked
        if slot.stop != STOP_RUNNING or most == 0 or len(made) < num_mtp or slot.length % 8:
            return
        text = [*request.sequence, *slot.emitted]
        copies: list[int] = []
        if looked:
            copies, _ = draft_copies(text, made[:num_mtp], num_copies=most, min_match=self.setup.min_match)
        assert slot.matched == bool(copies), f"a step says that copies were made: {slot.matched}"
        assert made[num_mtp:] == copies, f"copied {made[num_mtp:]} after {text[-5:]}, by the rule {copies}"
        self.paths["copies made"] += bool(copies)

    def _note_preemptions(self, before: list[tuple[Request, Phase, int, int]]) -> None:
        for request, phase, in_flight, preemptions in before:
            if request.preemptions > preemptions:
                self.paths[f"preempted in {phase.name}"] += 1
                self.paths["preempted with a step in flight"] += in_flight > 0
                self.paths["preempted while scoring"] += request.needs_scores
            if request.ending is FinishReason.STOP and isinstance(request.stop_match, str):
                self.paths["stop string with a step in flight"] += request.phase is Phase.LEAVING
                self.paths["stop string"] += request.phase is Phase.DONE

    def _check_streams(self) -> None:
        references = self.model.reference_streams(
            [
                ReferenceRequest(
                    prompt=turn.submit.prompt_ids,
                    sampling=turn.submit.sampling,
                    seed=turn.request.seed,
                    length_limit=turn.request.length_limit,
                    stop_ids=turn.request.stop_ids,
                    allowed_after=_allowed_after(turn, self.model.spec.vocab_size),
                )
                for turn, _ in self.ended
            ]
        )
        for (turn, finish), reference in zip(self.ended, references, strict=True):
            try:
                self._check_stream(turn, finish, reference)
                self._check_usage(turn, finish)
                if turn.submit.prompt_logprobs is not None and finish.reason is not FinishReason.ABORT:
                    self._check_scores(turn, finish)
            except AssertionError as error:
                error.add_note(f"{turn.submit}\n{finish}")
                raise

    def _check_stream(self, turn: Turn, finish: FinishEvent, reference: list[int]) -> None:
        expected, text, stop_string = cut_at_stop_string(reference, turn)
        if finish.reason is FinishReason.ABORT:
            assert turn.aborted, "aborted although its client didn't abort it"
            assert turn.emitted == expected[: len(turn.emitted)], (
                f"stream {turn.emitted} until its abort, alone {expected}"
            )
            return
        assert turn.emitted == expected, f"stream {turn.emitted}, alone {expected}"
        assert turn.text == text, f"text {turn.text!r}, alone {text!r}"
        last = expected[-1] if expected else None
        stop_match = stop_string if stop_string is not None else last if last in turn.request.stop_ids else None
        refused = None if stop_match is not None else _refused_at(turn, expected, self.model.spec.vocab_size)
        reason = (
            FinishReason.STOP
            if stop_match is not None
            else FinishReason.LENGTH
            if refused is None
            else FinishReason.ERROR
        )
        assert (finish.reason, finish.refused) == (reason, refused), f"finish reason {finish.reason}: {finish.error}"
        assert finish.stop_match == stop_match, f"stop match {finish.stop_match!r}, alone {stop_match!r}"

    def _check_usage(self, turn: Turn, finish: FinishEvent) -> None:
        usage, spec = finish.usage, finish.usage.spec
        assert usage.prompt_tokens == len(turn.submit.prompt_ids), "usage: prompt tokens"
        assert usage.completion_tokens == len(turn.emitted), "usage: completion tokens"
        assert usage.cached_tokens == (turn.cached or 0), (
            f"usage: {usage.cached_tokens} cached tokens, resumed from {turn.cached}"
        )
        emitted, drafted, accepted = (sum(column) for column in zip((0, 0, 0), *turn.steps, strict=True))
        beyond_stop = turn.num_first_steps + emitted - len(turn.emitted)
        may_lose = isinstance(finish.stop_match, str) or finish.refused is not None
        assert beyond_stop == 0 or (may_lose and beyond_stop > 0), f"{beyond_stop} tokens of the device are lost"
        assert spec.num_steps == len(turn.steps) == sum(spec.histogram), "usage: steps"
        assert spec.num_drafted == drafted == sum(spec.drafted_by_position), "usage: drafted"
        assert spec.num_accepted == accepted == sum(spec.accepted_by_position), "usage: accepted"
        if (
            self.setup.draft_accuracy == 1.0
            and not self.setup.max_copies
            and turn.submit.sampling.is_greedy
            and not _has_shaped_logits(turn)
        ):
            missed = drafted - accepted  # only the request's last step may drop drafts
            assert missed <= self.setup.max_draft_tokens, f"a perfect drafter lost {missed} drafts"

    def _check_scores(self, turn: Turn, finish: FinishEvent) -> None:
        prompt, scores = turn.submit.prompt_ids, finish.prompt_scores
        assert scores is not None
        assert [score.token_id for score in scores] == prompt[1:], (
            f"{len(scores)} scores for {len(prompt)} prompt tokens"
        )
        for index in self.rng.sample(range(len(scores)), min(4, len(scores))):
            hidden = torch.from_numpy(self.model.reference_state(prompt[: index + 1]).row[1:])
            logprobs = self.model.logits(hidden).log_softmax(-1)
            assert abs(scores[index].logprob - logprobs[prompt[index + 1]].item()) < 1e-4, (
                f"score of prompt token {index + 1}"
            )
            assert scores[index].top[0][0] == logprobs.argmax().item(), (
                f"most likely token at the position of prompt token {index + 1}"
            )

    def _check_live_states(self) -> None:
        """Check that every live state still equals its published prefix: no later write changed it."""
        for checkpoint in self.cache.checkpoints.live:
            key = tokens()
            for node in path_of(checkpoint.node):
                key.frombytes(node.run)
            assert (checkpoint.node.namespace, key.tobytes()) in self._published, "a live state was never published"
            self._check_state(checkpoint.row, self.cache.tree.page_ids(checkpoint.node), key, "live")

    def _check_accounting(self) -> None:
        cache, gate = self.cache, self.loop.scheduler._gate
        self.paths["evicted"] += cache.checkpoints.num_evicted
        self.paths["superseded"] += cache.checkpoints.num_superseded
        if cache.host is not None:
            self.paths["copied to the host"] += cache.host.num_created
            self.paths["evicted from the host"] += cache.host.num_evicted
            self.paths["lost before it was copied"] += cache.host.num_lost
        invariants.check(cache)
        self.now += 1000.0
        assert gate.num_live == 0, f"the gate counts {gate.num_live} sessions in an idle engine"
        cache.clear()
        invariants.check(cache)
        assert cache.host is None or not (cache.host.rows.num_used or cache.host.pages.num_used), "host memory leaked"
        assert cache.used_bytes == 0, f"{cache.rows.num_used} rows and {cache.pages.num_used} pages leaked"


def _allowed_after(turn: Turn, vocab_size: int) -> Callable[[Sequence[int]], NDArray[np.bool_]] | None:
    """The tokens that the request's own constraints allow, computed from scratch for each token; None: all tokens."""
    least, stop_ids = turn.submit.sampling.min_tokens, list(turn.request.stop_ids)
    if turn.automaton is None and not (least and stop_ids):
        return None
    rules = None if turn.automaton is None else turn.automaton.rules

    def allowed(emitted: Sequence[int]) -> NDArray[np.bool_]:
        found = np.ones(vocab_size, dtype=np.bool_) if rules is None else rules.allowed_after(emitted).copy()
        if len(emitted) < least:
            found[stop_ids] = False
        return found

    return allowed


def _refused_at(turn: Turn, emitted: list[int], vocab_size: int) -> str | None:
    """The field to report when no token is allowed next."""
    allowed = _allowed_after(turn, vocab_size)
    if (
        allowed is None
        or len(turn.submit.prompt_ids) + len(emitted) >= turn.request.length_limit
        or allowed(emitted).any()
    ):
        return None
    assert turn.automaton is not None, "only constrained output can end with no token allowed"
    return "sampling.min_tokens" if turn.automaton.rules.allowed_after(emitted).any() else "grammar.source"


def _has_shaped_logits(turn: Turn) -> bool:
    """True when the target doesn't choose by its raw logits: then no drafter is perfect."""
    return turn.submit.sampling.has_penalties or bool(turn.submit.sampling.logit_bias) or _is_constrained(turn)


def _is_constrained(turn: Turn) -> bool:
    return turn.automaton is not None or turn.submit.sampling.min_tokens > 0


def cut_at_stop_string(reference: list[int], turn: Turn) -> tuple[list[int], str, str | None]:
    """Tokens up to the one that completes a stop string, the text before it, and that string: the one that ends first,
    the longest of those. A string that is complete within the first `min_tokens` tokens doesn't count."""
    shown = reference[:-1] if reference and reference[-1] in turn.request.stop_ids else reference
    text = ""
    for count, token in enumerate(shown, 1):
        passed = len(text)
        text += TOKEN_TEXT[token]
        if count <= turn.submit.sampling.min_tokens:
            continue
        ends = range(passed + 1, len(text) + 1)
        found = [
            (end, end - len(stop), stop)
            for stop in turn.submit.sampling.stop
            for end in ends
            if text[:end].endswith(stop)
        ]
        if found:
            _, start, stop = min(found)
            return reference[:count], text[:start], stop
    return reference, text, None


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove one random setup.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--turns", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    proof = Proof(EngineSetup.random(arguments.seed))
    print(proof.setup)
    proof.run(arguments.turns)
    for path, count in sorted(proof.paths.items()):
        print(f"{count:8} {path}")


if __name__ == "__main__":
    main()
