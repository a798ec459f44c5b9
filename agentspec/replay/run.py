"""Run a whole replay: check the file against the options, run the sessions, and return the report.

All turns are checked before the first request is sent, so that an unusable file fails early with session and turn
named.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TextIO

import httpx
import msgspec

from agentspec.errors import ConfigError
from agentspec.replay import bodies, schedule
from agentspec.replay.client import CHAT_PATH, COMPLETION_PATH, TurnClient, find_target
from agentspec.replay.conversation import Conversation, ConversationError, keeps_live_history
from agentspec.replay.live import LiveSession
from agentspec.replay.measure import SessionRecord, TurnRecord, summarize
from agentspec.replay.options import ReplayOptions
from agentspec.replay.progress import Progress, Tally
from agentspec.replay.render import RenderedTurn, TraceRenderer
from agentspec.replay.reply import Reply
from agentspec.replay.report import Report
from agentspec.replay.schema import ReplayFile, Session, Turn
from agentspec.replay.subagents import AgentRun, Subagents, kept_sessions
from agentspec.replay.token_runs import TokenRuns
from agentspec.replay.warmup import Lane, Warmup, count_from

Render = Callable[[Session], Iterator[RenderedTurn]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    """The part of a session that will be replayed."""

    session: Session
    turns: list[Turn]
    fields: list[dict[str, Any]]
    """Sampling fields of each turn."""
    tools: list[dict[str, Any]]
    live: bool
    """Whether later prompts contain the model's own answers."""


def make_plans(file: ReplayFile, options: ReplayOptions) -> list[SessionPlan]:
    """Plan the sessions that the options select. Raises ConfigError naming session and turn when one can't be
    replayed."""
    sessions = kept_sessions(file.sessions, options.sessions, options.max_turns)
    subagents = Subagents(sessions)
    plans = [_plan(file, session, options, subagents.num_inherited(session)) for session in sessions]
    if options.arrival == "trace":
        try:
            schedule.arrivals(_agents(plans), options)
        except ValueError as error:
            raise ConfigError("arrival", options.arrival, str(error)) from None
    if options.warmup:
        num_requests, num_lanes = sum(len(plan.turns) for plan in plans), schedule.num_lanes(_agents(plans), options)
        if options.warmup * num_lanes >= num_requests:
            reason = f"{num_lanes} lanes could send all {num_requests} requests before the measurement begins"
            raise ConfigError("warmup", options.warmup, reason)
    return plans


def _agents(plans: list[SessionPlan]) -> list[Session]:
    """Return the sessions without a parent."""
    return [plan.session for plan in plans if plan.session.parent is None]


def _plan(file: ReplayFile, session: Session, options: ReplayOptions, num_inherited: int) -> SessionPlan:
    """Plan one session. `num_inherited`: number of its turns whose answers its forks inherit."""
    if session.world is not None:
        _check_live(session, options)
    turns = session.turns[: options.max_turns]
    try:
        live = keeps_live_history(session, options.history, max(len(turns) - 1, num_inherited))
    except ValueError as error:
        raise ConfigError("history", options.history, str(error)) from None
    fields: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        try:
            if options.output == "forced":
                _check_recorded(turn)
            fields.append(bodies.turn_fields(turn, file.meta, fixed_length=options.output == "length"))
        except ValueError as error:
            raise ConfigError(
                "output", options.output, f"session {session.session_id!r}: turns[{index}] {error}"
            ) from None
    return SessionPlan(session=session, turns=turns, fields=fields, tools=file.tools(session), live=live)


def _check_live(session: Session, options: ReplayOptions) -> None:
    reason = (
        f"session {session.session_id!r} has a world: the model's own answers decide what follows, "
        "and none are recorded"
    )
    if options.history == "recorded":
        raise ConfigError("history", options.history, reason)
    if options.output != "free":
        raise ConfigError("output", options.output, reason)
    if options.warmup:
        raise ConfigError(
            "warmup",
            options.warmup,
            f"session {session.session_id!r} has a world, and all its calls and goals are counted",
        )


def _check_recorded(turn: Turn) -> None:
    if turn.messages is not None and turn.recorded_message is None:
        raise ValueError("has no expect.message, which --output forced needs")
    if turn.messages is None and turn.recorded_output_tokens is None:
        raise ValueError(
            "has neither expect.output_tokens nor expect.usage.completion_tokens, which --output forced needs"
        )


async def run_replay(
    file: ReplayFile,
    options: ReplayOptions,
    client: httpx.AsyncClient,
    model: str | None,
    *,
    renderer: TraceRenderer | None = None,
    progress: TextIO | None = None,
) -> Report:
    """Replay `file` against the server at the client's base URL (its root, without /v1) and measure it.

    `model`: the model name, or None for the first that the server lists. `renderer`: required for forced outputs, and
    only then. `progress`: stream for live progress. Raises ConfigError for options that the file or the server can't
    satisfy, and TargetError when the server can't be used. A failed turn is a result, not an error."""
    plans = make_plans(file, options)
    assert (renderer is not None) == (options.output == "forced"), "forced outputs, and only those, are rendered here"
    target = await find_target(client, model)
    if renderer is not None and not target.is_agentspec:
        raise ConfigError(
            "output", options.output, f"{target.url} is not agentspec's server; others don't know forced outputs"
        )
    num_live = sum(plan.session.world is not None for plan in plans)
    measured_from = None if options.warmup else 0.0
    tally = Tally(
        num_sessions=len(plans),
        num_turns=sum(len(plan.turns) for plan in plans),
        num_live=num_live,
        measured_from=measured_from,
    )
    async with AsyncExitStack() as stack:
        if progress is not None:
            await stack.enter_async_context(Progress(tally, progress))
        turn_client = TurnClient(client, target, timeout=options.timeout, start=asyncio.get_running_loop().time())
        render = None if renderer is None else functools.partial(_render, file, renderer)
        runner = _Runner(plans, options, turn_client, tally, render)
        warmup = Warmup(options.warmup, turn_client.now, on_end=functools.partial(setattr, tally, "measured_from"))
        await schedule.run_all(_agents(plans), options, runner.run, turn_client.now, warmup)
        wall = turn_client.now() - warmup.measured_from
    count_from(runner.records, warmup.measured_from)
    return Report(
        file=file.path,
        source=file.meta.source,
        model=target.model,
        url=target.url,
        settings=options.settings(),
        sessions=runner.records,
        summary=summarize(runner.records, wall, num_gpus=options.gpus),
        slo=options.slo,
    )


def _render(file: ReplayFile, renderer: TraceRenderer, session: Session) -> Iterator[RenderedTurn]:
    inherited = file.inherited(session)
    whole = msgspec.structs.replace(session, turns=[*inherited, *session.turns])
    return itertools.islice(renderer.turns(file, whole), len(inherited), None)


class _Runner:
    """Runs planned sessions with their subagents over one client, and keeps their records."""

    def __init__(
        self, plans: list[SessionPlan], options: ReplayOptions, client: TurnClient, tally: Tally, render: Render | None
    ) -> None:
        """`render`: renders a session to token ids, for forced outputs."""
        self._plans = {plan.session.session_id: plan for plan in plans}
        self._records = {name: _new_record(plan) for name, plan in self._plans.items()}
        self._subagents = Subagents(plan.session for plan in plans)
        self._wait = options.wait
        self._token_runs = TokenRuns(options.seed, *options.token_ids)
        self._render = render
        self._client = client
        self._tally = tally

    @property
    def records(self) -> list[SessionRecord]:
        return list(self._records.values())

    async def run(self, session: Session, due: float, lane: Lane) -> None:
        """Run a session and all its subagents to the end."""
        async with asyncio.TaskGroup() as group:
            await self._run_session(
                AgentRun(lane, self._subagents, group, self._run_session), session, due, Conversation()
            )

    async def _run_session(self, agent: AgentRun, session: Session, since: float, conversation: Conversation) -> float:
        """Run one session; returns when its last turn ended. A failed request ends the session: subagents that it has
        started continue, the others fail with it."""
        plan, record = self._plans[session.session_id], self._records[session.session_id]
        if session.world is not None:
            num_ended = await self._run_live(
                plan, LiveSession(plan.turns, session.world, plan.tools), record, since, agent
            )
            self._tally.num_live -= 1
        else:
            num_ended = await self._run_script(plan, record, since, agent, conversation)
        for lost in self._subagents.not_started(session, num_ended):
            self._records[lost.session_id].error = "not started: the session that starts it failed before"
            self._tally.sessions_done += 1
            self._tally.num_live -= lost.world is not None
        self._tally.sessions_done += 1
        return record.last_end

    async def _run_script(
        self, plan: SessionPlan, record: SessionRecord, since: float, agent: AgentRun, conversation: Conversation
    ) -> int:
        """Run the turns of a recorded session. Each is due its recorded wait after the turn and the subagents that it
        follows. Returns the number of completed turns."""
        rendered = iter(()) if self._render is None else self._render(plan.session)
        for index, turn in enumerate(plan.turns):
            since = max(since, await agent.join_subagents(plan.session, index))
            entry = await self._new_entry(record, turn.delay_kind, self._wait(turn.delay_ms), since, agent.lane)
            try:
                forced = next(rendered, None)
                path, body, entry.diverged = (
                    self._body(plan, index, conversation)
                    if forced is None
                    else (COMPLETION_PATH, bodies.forced_body(forced, model=self._client.model), False)
                )
            except ConversationError as error:
                entry.error, entry.end = str(error), self._client.now()
                self._count(record, entry, agent.lane)
                return index
            reply = await self._send(path, body, record, entry, agent.lane)
            if reply is None:
                return index
            conversation.add_answer(turn, reply.message(), live=plan.live)
            since = entry.end
            agent.start_subagents(plan.session, index, since, conversation)
        return len(plan.turns)

    def _body(self, plan: SessionPlan, index: int, conversation: Conversation) -> tuple[str, dict[str, Any], bool]:
        """Return path and body of a turn's request, and whether the previous answer had to be replaced. Raises
        ConversationError."""
        turn, fields, model = plan.turns[index], plan.fields[index], self._client.model
        if turn.messages is None:
            return (
                COMPLETION_PATH,
                bodies.completion_body(prompt_ids=self._token_runs.prompt(turn), fields=fields, model=model),
                False,
            )
        messages, diverged = conversation.prompt(turn)
        return CHAT_PATH, bodies.chat_body(messages=messages, tools=plan.tools, fields=fields, model=model), diverged

    async def _run_live(
        self, plan: SessionPlan, live: LiveSession, record: SessionRecord, since: float, agent: AgentRun
    ) -> int:
        """Run the user turns of a session with a world. The calls of the model cause further requests, without tool
        time. Returns the number of completed turns."""
        record.outcome = live.outcome
        for index, turn in enumerate(plan.turns):
            live.begin_turn()
            since = max(since, await agent.join_subagents(plan.session, index))
            wait, delay_kind, is_answered = self._wait(turn.delay_ms), turn.delay_kind, False
            while not is_answered:
                entry = await self._new_entry(record, delay_kind, wait, since, agent.lane)
                entry.user_turn = index
                body = bodies.chat_body(
                    messages=live.prompt(), tools=plan.tools, fields=plan.fields[index], model=self._client.model
                )
                reply = await self._send(CHAT_PATH, body, record, entry, agent.lane)
                if reply is None:
                    live.fail(str(entry.error))
                    return index
                is_answered = not live.add_answer(reply.message(), reply.finish_reason)
                since, wait, delay_kind = entry.end, 0.0, "tool"
                if not is_answered:
                    record.num_planned += 1
                    self._tally.num_turns += 1
            agent.start_subagents(plan.session, index, since, Conversation())
        return len(plan.turns)

    async def _new_entry(
        self, record: SessionRecord, delay_kind: str, wait: float, since: float, lane: Lane
    ) -> TurnRecord:
        """Wait until a request is due, `wait` seconds after `since`, and create its record. Warm-up requests don't
        wait."""
        is_warmup = await lane.admit()
        due = since if is_warmup else lane.due(since + wait)
        await asyncio.sleep(max(0.0, due - self._client.now()))
        entry = TurnRecord(
            session_id=record.session_id,
            turn=record.num_warmup + len(record.turns),
            delay_kind=delay_kind,
            due=due,
            sent=self._client.now(),
            is_warmup=is_warmup,
        )
        record.turns.append(entry)
        return entry

    async def _send(
        self, path: str, body: dict[str, Any], record: SessionRecord, entry: TurnRecord, lane: Lane
    ) -> Reply | None:
        """Send one request; None when it failed."""
        self._tally.num_running += 1
        reply = await self._client.send(path, body, entry)
        self._tally.num_running -= 1
        self._count(record, entry, lane)
        return reply

    def _count(self, record: SessionRecord, entry: TurnRecord, lane: Lane) -> None:
        """Count a request that ended. Warm-up requests are dropped unless they failed."""
        record.last_end = entry.end
        if entry.is_warmup:
            lane.end_request()
        if entry.is_warmup and entry.error is None:
            record.turns.pop()
            record.num_warmup += 1
            record.num_planned -= 1
            self._tally.num_turns -= 1
            return
        self._tally.count_turn(entry)
        if entry.error is not None:
            record.error = f"turn {entry.turn + 1}: {entry.error}"


def _new_record(plan: SessionPlan) -> SessionRecord:
    session = plan.session
    parent = None if session.parent is None else session.parent.session_id
    return SessionRecord(session_id=session.session_id, group=session.group, num_planned=len(plan.turns), parent=parent)


def http_client(options: ReplayOptions) -> httpx.AsyncClient:
    """Create the client for `--base-url`, with unlimited connections and no time limit except the turn's own.

    Raises ConfigError for an invalid URL."""
    assert options.base_url is not None
    root = options.base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key is not None else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        return httpx.AsyncClient(base_url=root, headers=headers, timeout=None, limits=limits)
    except httpx.InvalidURL as error:
        raise ConfigError("base_url", options.base_url, str(error)) from None
