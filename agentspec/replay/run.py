"""A whole replay: checks the file against the options, runs the sessions, and returns the report.

Every turn's request is checked before the first one is sent, so a file that can't be replayed as asked fails at once and by name.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TextIO

import httpx

from agentspec.errors import ConfigError
from agentspec.replay import bodies, schedule
from agentspec.replay.client import CHAT_PATH, COMPLETION_PATH, Target, TurnClient, find_target
from agentspec.replay.conversation import Conversation, ConversationError, keeps_live_history
from agentspec.replay.live import LiveSession
from agentspec.replay.measure import SessionRecord, TurnRecord, summarize
from agentspec.replay.options import ReplayOptions
from agentspec.replay.progress import Progress, Tally
from agentspec.replay.render import RenderedTurn, TraceRenderer
from agentspec.replay.reply import Reply
from agentspec.replay.report import Report
from agentspec.replay.schema import ReplayFile, Session, Turn
from agentspec.replay.token_runs import TokenRuns

Render = Callable[[Session], Iterator[RenderedTurn]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    """A session as it will be replayed."""

    session: Session
    turns: list[Turn]
    fields: list[dict[str, Any]]
    """Sampling fields of each turn."""
    tools: list[dict[str, Any]]
    live: bool
    """Whether history holds the model's own answers."""


def make_plans(file: ReplayFile, options: ReplayOptions) -> list[SessionPlan]:
    """What the options leave of the file. Raises ConfigError, naming session and turn, for what can't be replayed as asked."""
    plans = [_plan(file, session, options) for session in file.sessions[: options.sessions]]
    if options.arrival == "trace":
        try:
            schedule.arrivals([plan.session for plan in plans], options)
        except ValueError as error:
            raise ConfigError("arrival", options.arrival, str(error)) from None
    return plans


def _plan(file: ReplayFile, session: Session, options: ReplayOptions) -> SessionPlan:
    if session.parent is not None:
        raise ConfigError("file", file.path, f"session {session.session_id!r}: parent: subagents can't be replayed yet")
    if session.world is not None:
        _check_live(session, options)
    turns = session.turns[: options.max_turns]
    try:
        live = keeps_live_history(session, options.history, len(turns))
    except ValueError as error:
        raise ConfigError("history", options.history, str(error)) from None
    fields: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        try:
            if options.output == "forced":
                _check_recorded(turn)
            fields.append(bodies.turn_fields(turn, file.meta, fixed_length=options.output == "length"))
        except ValueError as error:
            raise ConfigError("output", options.output, f"session {session.session_id!r}: turns[{index}] {error}") from None
    return SessionPlan(session=session, turns=turns, fields=fields, tools=file.tools(session), live=live)


def _check_live(session: Session, options: ReplayOptions) -> None:
    reason = f"session {session.session_id!r} has a world: the model's own answers decide what follows, and none are recorded"
    if options.history == "recorded":
        raise ConfigError("history", options.history, reason)
    if options.output != "free":
        raise ConfigError("output", options.output, reason)


def _check_recorded(turn: Turn) -> None:
    if turn.messages is not None and turn.recorded_message is None:
        raise ValueError("has no expect.message, which --output forced needs")
    if turn.messages is None and turn.recorded_output_tokens is None:
        raise ValueError("has neither expect.output_tokens nor expect.usage.completion_tokens, which --output forced needs")


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

    `model` is the name to ask for, None the first that the server lists. `renderer` makes the tokens of forced outputs, and is there for those alone.
    `progress` is where live progress is shown. Raises ConfigError for options that the file or the server can't meet and TargetError when there is no
    server; a turn that fails is a result, not an error."""
    plans = make_plans(file, options)
    assert (renderer is not None) == (options.output == "forced"), "forced outputs, and only those, are rendered here"
    target = await find_target(client, model)
    if renderer is not None and not target.is_agentspec:
        raise ConfigError("output", options.output, f"{target.url} is not agentspec's server; others don't know forced outputs")
    num_live = sum(plan.session.world is not None for plan in plans)
    tally = Tally(num_sessions=len(plans), num_turns=sum(len(plan.turns) for plan in plans), num_live=num_live)
    async with AsyncExitStack() as stack:
        if progress is not None:
            await stack.enter_async_context(Progress(tally, progress))
        turn_client = TurnClient(client, target, timeout=options.timeout, start=asyncio.get_running_loop().time())
        render = None if renderer is None else functools.partial(renderer.turns, file)
        runner = _Runner(plans, options, turn_client, tally, render)
        await schedule.run_all([plan.session for plan in plans], options, runner.run, turn_client.now)
        wall = turn_client.now()
    return _report(file, options, target, runner.records, wall)


class _Runner:
    """Runs planned sessions over one client and keeps their records."""

    def __init__(self, plans: list[SessionPlan], options: ReplayOptions, client: TurnClient, tally: Tally, render: Render | None) -> None:
        """`render`: turns a session into tokens, where outputs are forced."""
        self._plans = {plan.session.session_id: plan for plan in plans}
        self._records = {
            name: SessionRecord(session_id=name, group=plan.session.group, num_planned=len(plan.turns)) for name, plan in self._plans.items()
        }
        self._delay_scale = options.delay_scale
        self._token_runs = TokenRuns(options.seed, *options.token_ids)
        self._render = render
        self._client = client
        self._tally = tally

    @property
    def records(self) -> list[SessionRecord]:
        return list(self._records.values())

    async def run(self, session: Session, due: float) -> None:
        """A session from its first turn to its last. The first request that fails ends it."""
        plan, record = self._plans[session.session_id], self._records[session.session_id]
        if session.world is not None:
            await self._run_live(plan, LiveSession(plan.turns, session.world, plan.tools), record, due)
            self._tally.num_live -= 1
        else:
            await self._run_script(plan, record, due)
        self._tally.sessions_done += 1

    async def _run_script(self, plan: SessionPlan, record: SessionRecord, due: float) -> None:
        """The turns of a script, one after another, each due its recorded wait after the last token of the one before."""
        conversation = Conversation(live=plan.live)
        rendered = iter(()) if self._render is None else self._render(plan.session)
        for index, turn in enumerate(plan.turns):
            due += turn.delay_ms / 1000 * self._delay_scale
            entry = await self._new_entry(record, turn.delay_kind, due)
            try:
                forced = next(rendered, None)
                path, body, entry.diverged = self._body(plan, index, conversation) if forced is None else self._forced(forced)
            except ConversationError as error:
                entry.error, entry.end = str(error), self._client.now()
                self._count(record, entry)
                return
            reply = await self._send(path, body, record, entry)
            if reply is None:
                return
            conversation.answer(turn, reply.message())
            due = entry.end

    def _body(self, plan: SessionPlan, index: int, conversation: Conversation) -> tuple[str, dict[str, Any], bool]:
        """Path and body of a turn's request, and whether the answer before it had to be replaced. Raises ConversationError."""
        turn, fields, model = plan.turns[index], plan.fields[index], self._client.model
        if turn.messages is None:
            return COMPLETION_PATH, bodies.completion_body(prompt_ids=self._token_runs.prompt(turn), fields=fields, model=model), False
        messages, diverged = conversation.prompt(turn)
        return CHAT_PATH, bodies.chat_body(messages=messages, tools=plan.tools, fields=fields, model=model), diverged

    def _forced(self, turn: RenderedTurn) -> tuple[str, dict[str, Any], bool]:
        return COMPLETION_PATH, bodies.forced_body(turn, model=self._client.model), False

    async def _run_live(self, plan: SessionPlan, live: LiveSession, record: SessionRecord, due: float) -> None:
        """The turns of the user, each with as many requests as the model's calls bring. Their results are there at once."""
        record.outcome = live.outcome
        for index, turn in enumerate(plan.turns):
            live.begin()
            due += turn.delay_ms / 1000 * self._delay_scale
            delay_kind, is_answered = turn.delay_kind, False
            while not is_answered:
                entry = await self._new_entry(record, delay_kind, due)
                entry.user_turn = index
                body = bodies.chat_body(messages=live.prompt(), tools=plan.tools, fields=plan.fields[index], model=self._client.model)
                reply = await self._send(CHAT_PATH, body, record, entry)
                if reply is None:
                    live.fail(str(entry.error))
                    return
                is_answered = not live.take(reply.message(), reply.finish_reason)
                due, delay_kind = entry.end, "tool"
                if not is_answered:
                    record.num_planned += 1
                    self._tally.num_turns += 1

    async def _new_entry(self, record: SessionRecord, delay_kind: str, due: float) -> TurnRecord:
        """Wait until a request is due and open its record."""
        await asyncio.sleep(max(0.0, due - self._client.now()))
        entry = TurnRecord(session_id=record.session_id, turn=len(record.turns), delay_kind=delay_kind, due=due, sent=self._client.now())
        record.turns.append(entry)
        return entry

    async def _send(self, path: str, body: dict[str, Any], record: SessionRecord, entry: TurnRecord) -> Reply | None:
        """One request; None when it failed."""
        self._tally.num_running += 1
        reply = await self._client.send(path, body, entry)
        self._tally.num_running -= 1
        self._count(record, entry)
        return reply

    def _count(self, record: SessionRecord, entry: TurnRecord) -> None:
        self._tally.add(entry)
        if entry.error is not None:
            record.error = f"turn {entry.turn + 1}: {entry.error}"


def _report(file: ReplayFile, options: ReplayOptions, target: Target, records: list[SessionRecord], wall: float) -> Report:
    return Report(
        file=file.path,
        source=file.meta.source,
        model=target.model,
        url=target.url,
        settings=options.settings(),
        sessions=records,
        summary=summarize(records, wall, num_gpus=options.gpus),
        slo=options.slo,
    )


def http_client(options: ReplayOptions) -> httpx.AsyncClient:
    """A client for `--base-url`: as many connections as the schedule wants, and no time limit but the turn's own.

    Raises ConfigError when the URL can't be one."""
    assert options.base_url is not None
    root = options.base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key is not None else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        return httpx.AsyncClient(base_url=root, headers=headers, timeout=None, limits=limits)
    except httpx.InvalidURL as error:
        raise ConfigError("base_url", options.base_url, str(error)) from None
