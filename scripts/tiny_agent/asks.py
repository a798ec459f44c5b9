"""Asks: a user's request that one call answers, with its wording, its call and the answer to its result.

Tasks combine asks into turns. The code is the same for all domains, which differ only in data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentspec.replay.world import Calculate, Create, Delete, Find, Record, Update
from scripts.tiny_agent import answers, phrases, values
from scripts.tiny_agent.domain import Column, Domain, Kind, Operation
from scripts.tiny_agent.phrases import Given
from scripts.tiny_agent.play import Play, busy, error_of

AskKind = Literal["facts", "hits", "count", "facts_of_hits", "create", "update", "delete"]


@dataclass(kw_only=True, slots=True)
class Ask:
    """A request, its call, and the subject of its answer."""

    kind: AskKind
    domain: Domain
    operation: Operation
    arguments: Record
    order: str
    """The request as an order: `cancel order O-11`."""
    question: str | None
    """The same as a question, where that is natural."""
    wish: str
    """The user's wish, as text for a thought."""
    key: Any = None
    """The text that names the record; None for lists and new records."""
    columns: list[str] = field(default_factory=list)
    """Columns that are asked for or changed."""


def word(play: Play, operation: Operation, *others: str) -> str:
    """The operation's own word, or one that every tool of its kind understands."""
    return play.rng.choice((operation.word, operation.word, *others)) if others else operation.word


def naming(operation: Operation) -> tuple[str, str] | None:
    """The parameter and the column by which a tool finds its one record; None when it takes several or none."""
    match = getattr(operation.action, "match", {})
    return next(iter(match.items())) if len(match) == 1 else None


def column_of(domain: Domain, name: str) -> Column:
    return next(column for column in (domain.key, *domain.columns) if column.name == name)


def refer(play: Play, ask_domain: Domain, operation: Operation, record: Record) -> tuple[str, Any]:
    """How the user names a record for this tool, and the value that the tool takes."""
    found = naming(operation)
    assert found is not None
    column = column_of(ask_domain, found[1])
    value = record[found[1]]
    bare = (
        column.kind in ("code", "path")
        and named_by_tools(ask_domain)
        and sum(str(value) in play.tables()[d.table] for d in play.domains if d.data is not None) == 1
    )
    return phrases.reference(play.rng, ask_domain.noun, operation.params[found[0]].label, value, bare=bare), value


def named_by_tools(domain: Domain) -> bool:
    """Whether the tools' descriptions say what their records are called."""
    return any(
        domain.noun.lower() in operation.tool["function"]["description"].lower() for operation in domain.operations
    )


def kinds(domain: Domain, operation: Operation) -> list[Kind]:
    """Of all parameters: a value of a kind that stands there once needs no label. A key always needs it."""
    return [domain.key.kind, *(column.kind for column in operation.params.values())]


def given(play: Play, column: Column, value: Any) -> Given:
    """A value with the words for it: what the system prompt tells can be said as `me` and `today`."""
    if column.kind == "person" and value == play.setting.me:
        return Given(column, value, "me")
    if column.kind == "date" and value == play.setting.today and play.rng.random() < 0.7:
        return Given(column, value, "today")
    return Given(column, value)


def fresh(play: Play, column: Column, old: Any = None) -> Any:
    """A new value for a column, other than the old one."""
    if column.kind == "person" and play.setting.me not in (None, old) and play.rng.random() < 0.3:
        return play.setting.me
    if column.kind == "date" and play.setting.today not in (None, old) and play.rng.random() < 0.4:
        return play.setting.today
    for _ in range(20):
        value = (
            values.sentence(play.rng, play.split)
            if column.kind == "page"
            else values.draw(column, play.rng, play.split)
        )
        if value != old:
            return value
    return value


def shown_columns(domain: Domain, operation: Operation, record: Record) -> list[Column]:
    """Columns that the tool's result shows, but for its key and for whole pages."""
    show = getattr(operation.action, "show", []) or list(record)
    named = naming(operation) if not isinstance(operation.action, Find) else None
    return [
        c
        for c in domain.columns
        if c.name in show and c.name in record and c.kind != "page" and (named is None or named[1] != c.name)
    ]


_FACT_QUESTIONS = (
    "(what is|what's) the {l} of {r}",
    "(what is|what's) the {l} (for|on) {r}",
    "(what|which) {l} does {r} have",
    "for {r}, what is the {l}",
    "what do we have as the {l} of {r}",
    "do you know the {l} of {r}",
    "what does the system say about the {l} of {r}",
)
_FACTS_QUESTIONS = (
    "what are the {l} of {r}",
    "for {r}, what are the {l}",
    "do you know the {l} of {r}",
    "what are the {l} (for|on) {r}",
)
_FACT_ORDERS = (
    "(tell|give|show|get|read) me the {l} of {r}",
    "(look up|check|find out|get) the {l} of {r}",
    "{w} {r} and (tell|give) me the {l}",
    "(look up|check) {r} and tell me its {l}",
    "(tell|give) me the {l} (for|on) {r}",
    "let me know the {l} of {r}",
)
_FACT_NOTES = ("{l} of {r}", "{r}: {l}", "{r}, {l}")


def facts(play: Play, domain: Domain, operation: Operation, record: Record, num: int = 1) -> Ask | None:
    """Columns of one record."""
    columns = shown_columns(domain, operation, record)
    if naming(operation) is None or len(columns) < num:
        return None
    columns = play.rng.sample(columns, num)
    ref, value = refer(play, domain, operation, record)
    labels = phrases.listed([c.label for c in columns])
    slots = {"l": labels, "r": ref, "w": operation.word}
    questions = _FACT_QUESTIONS if num == 1 else _FACTS_QUESTIONS
    terse = play.setting.tone == "terse" and play.rng.random() < 0.5
    return Ask(
        kind="facts",
        domain=domain,
        operation=operation,
        arguments={naming(operation)[0]: value},  # type: ignore[index]
        order=phrases.one_of(play.rng, _FACT_ORDERS, **slots),
        question=phrases.one_of(play.rng, _FACT_NOTES if terse else questions, **slots),
        wish=f"the {labels} of {domain.noun} {value}",
        key=value,
        columns=[c.name for c in columns],
    )


def searched(play: Play, operation: Operation, record: Record, num: int) -> list[Given]:
    """Values of a record to search by, as the tool's parameters."""
    action = operation.action
    assert isinstance(action, Find)
    usable = [
        name
        for name, column in operation.params.items()
        if name != action.limit and column.kind != "page" and part_of(play, action, name, record) is not None
    ]
    if not set(operation.required) <= set(usable):
        return []
    rest = [name for name in usable if name not in operation.required]
    chosen = [*operation.required, *play.rng.sample(rest, max(0, min(num - len(operation.required), len(rest))))]
    return [given(play, operation.params[name], part_of(play, action, name, record)) for name in chosen]


def part_of(play: Play, action: Find, name: str, record: Record) -> Any:
    """What one searches for to find this record by a parameter."""
    column = action.match.get(name) or action.contains.get(name)
    value = record.get(column) if column is not None else None
    if value is None or name in action.match:
        return None if isinstance(value, list) else value
    if isinstance(value, list):
        return play.rng.choice(value) if value else None
    words = [w.strip(".,:;!?") for w in str(value).split()]
    long = [w for w in words if len(w) > 3 and w.isalnum()]
    return play.rng.choice(long) if long else None


_FIND_ORDERS = (
    "(list|show me|find|get|look up|give me) [all ]{f}",
    "{w} {f}",
    "(search for|look for|show) {f}",
    "give me a list of {f}",
    "find out which {f} there are",
    "tell me which {f} we have",
)
_FIND_QUESTIONS = (
    "which {f} (are there|do we have|can you find)",
    "what {f} (are there|do we have)",
    "are there any {f}",
    "do we have any {f}",
)
_COUNT_QUESTIONS = (
    "how many {f} are there",
    "how many {f} do we have",
    "what is the number of {f}",
    "how many {f} can you find",
)
_COUNT_MY_QUESTIONS = ("how many of {f} are there", "what is the number of {f}", "how many are {f}")
_COUNT_MY_ORDERS = ("count {f}", "tell me the number of {f}", "(find out|check) how many of {f} there are")
_COUNT_ORDERS = (
    "count {f}",
    "tell me how many {f} there are",
    "(find out|check|look up) how many {f} we have",
    "give me the number of {f}",
)


def find(
    play: Play,
    domain: Domain,
    operation: Operation,
    searched: list[Given],
    *,
    counting: bool = False,
    limit: int | None = None,
) -> Ask:
    """All records that match, or their number."""
    action = operation.action
    assert isinstance(action, Find)
    contains = {operation.params[name].name for name in action.contains if name in operation.params}
    text = phrases.filters(play.rng, domain.plural, searched, contains, kinds(domain, operation))
    arguments = {name: g.value for name, column in operation.params.items() for g in searched if g.column is column}
    if counting:
        orders: tuple[str, ...] = _COUNT_ORDERS
        questions: tuple[str, ...] = _COUNT_QUESTIONS
        if text.startswith("my "):
            orders, questions = _COUNT_MY_ORDERS, _COUNT_MY_QUESTIONS
    else:
        orders, questions = _FIND_ORDERS, _FIND_QUESTIONS
        if text.startswith("my "):
            orders, questions = (
                ("(list|show me|find|get|look up|give me) {f}", "{w} {f}", "(search for|show) {f}"),
                ("(what|which) are {f}",),
            )
    order, question = (phrases.one_of(play.rng, t, f=text, w=operation.word) for t in (orders, questions))
    if limit is not None and action.limit is not None:
        arguments[action.limit] = limit
        label = operation.params[action.limit].label
        order, question = (
            order
            + phrases.one_of(
                play.rng, (", at most {n}", ", {l} {n}", ", {l}: {n}", ", no more than {n}"), n=str(limit), l=label
            ),
            "",
        )
    by = phrases.listed([name for name in operation.params if name in arguments]) if arguments else ""
    return Ask(
        kind="count" if counting else "hits",
        domain=domain,
        operation=operation,
        arguments=arguments,
        order=order,
        question=question or None,
        wish=("the number of " if counting else "") + domain.plural + (f" by {by}" if by else ""),
    )


_CREATE_ORDERS = (
    "{w} {a}{p}",
    "{w} {a}{p}",
    "{w} a new {n}{p}",
    "(create|make|add|set up) (a new {n}|{a}){p}",
    "{w} another {n}{p}",
)


def create(
    play: Play,
    domain: Domain,
    operation: Operation,
    *,
    without: tuple[str, ...] = (),
    said: dict[str, Given] | None = None,
) -> Ask | None:
    """A new record with the required values and some of the others. `without`: parameters left out; `said`: values that
    have words of their own."""
    action = operation.action
    if not isinstance(action, Create):
        return None
    optional = [name for name in operation.params if name not in operation.required and not (said and name in said)]
    chosen = {
        *operation.required,
        *(said or ()),
        *play.rng.sample(optional, play.rng.randint(0, min(3, len(optional)))),
    } - set(without)
    told: dict[str, Given] = {}
    for name, column in operation.params.items():
        if name in chosen:
            told[name] = said[name] if said and name in said else given(play, column, fresh(play, column))
    key = next(
        (told[name].value for name, column in action.set.items() if column == domain.key.name and name in told), None
    )
    if key is not None and str(key) in play.tables()[domain.table]:
        return None
    slots = {
        "n": domain.noun,
        "a": phrases.article(domain.noun),
        "p": phrases.parts(play.rng, list(told.values()), kinds(domain, operation)),
    }
    return Ask(
        kind="create",
        domain=domain,
        operation=operation,
        arguments={name: g.value for name, g in told.items()},
        order=phrases.one_of(play.rng, _CREATE_ORDERS, w=operation.word, **slots),
        question=None,
        wish=f"a new {domain.noun}" + (f" with {phrases.listed(list(told))}" if told else ""),
    )


def update(
    play: Play,
    domain: Domain,
    operation: Operation,
    record: Record,
    *,
    num: int = 1,
    ref: str | None = None,
    said: dict[str, Given] | None = None,
) -> Ask | None:
    """New values for columns of one record. `ref`: words that stand for the record; `said`: the parameters to set, with
    words of their own."""
    action = operation.action
    if not isinstance(action, Update) or naming(operation) is None:
        return None
    named, value = refer(play, domain, operation, record)
    settable = [name for name in action.set if name in operation.params and name not in operation.required]
    chosen = [name for name in action.set if name in operation.required]
    chosen += list(said) if said else play.rng.sample(settable, max(0, min(num - len(chosen), len(settable))))
    if not chosen:
        return None
    words = {
        name: given(play, operation.params[name], fresh(play, operation.params[name], record.get(action.set[name])))
        for name in chosen
    } | (said or {})
    told = list(words.values())
    it = ref == "it" and len(told) == 1
    names = [name for name in operation.params if name in chosen]
    return Ask(
        kind="update",
        domain=domain,
        operation=operation,
        arguments={name: g.value for name, g in zip(chosen, told, strict=True)} | {naming(operation)[0]: value},  # type: ignore[index]
        order=phrases.settings_of_it(play.rng, told)
        if it
        else phrases.settings(play.rng, ref or named, operation.word, told, described=ref is not None),
        question=None,
        wish=f"to change {phrases.listed(names)} of {domain.noun} {value}",
        key=value,
        columns=[action.set[name] for name in names]
        + [name for name in action.fixed if name not in action.set.values()],
    )


def end(play: Play, domain: Domain, operation: Operation, record: Record, *, ref: str | None = None) -> Ask | None:
    """Closes or deletes one record."""
    action = operation.action
    if not isinstance(action, (Update, Delete)) or naming(operation) is None:
        return None
    named, value = refer(play, domain, operation, record)
    extra = [name for name in operation.params if name != naming(operation)[0]]  # type: ignore[index]
    chosen = [name for name in extra if name in operation.required or play.rng.random() < 0.3]
    told = [given(play, operation.params[name], fresh(play, operation.params[name])) for name in chosen]
    words = ("delete", "remove") if isinstance(action, Delete) else ()
    columns = (
        [action.set[name] for name in chosen if name in action.set] + list(action.fixed)
        if isinstance(action, Update)
        else []
    )
    return Ask(
        kind="update" if isinstance(action, Update) else "delete",
        domain=domain,
        operation=operation,
        arguments={name: g.value for name, g in zip(chosen, told, strict=True)} | {naming(operation)[0]: value},  # type: ignore[index]
        order=f"{word(play, operation, *words)} "
        f"{ref or named}{phrases.parts(play.rng, told, kinds(domain, operation))}",
        question=None,
        wish=f"to {operation.word} {domain.noun} {value}",
        key=value,
        columns=columns,
    )


def known(play: Play, ask: Ask) -> Record | None:
    """The record from earlier results, if it answers the question."""
    if ask.kind != "facts":
        return None
    found = naming(ask.operation)
    for (table, _), record in play.known.items():
        if (
            found
            and table == ask.domain.table
            and record.get(found[1]) == ask.key
            and all(name in record for name in ask.columns)
        ):
            return record
    return None


def say(ask: Ask, result: Any) -> answers.Said:
    """The answer to an ask that follows from its result."""
    error = error_of(result)
    if error is not None:
        return answers.failed(ask.domain, ask.key, error, error if busy(ask.operation, result) else None)
    match ask.kind:
        case "facts":
            return answers.facts(
                ask.domain.noun, ask.key, [(answers.label_of(ask.domain, name), result[name]) for name in ask.columns]
            )
        case "hits":
            return answers.hits(ask.domain, result)
        case "count":
            return answers.count(ask.domain, len(result))
        case "facts_of_hits":
            if not result:
                return answers.hits(ask.domain, result)
            name = ask.columns[0]
            label, key = answers.label_of(ask.domain, name), ask.domain.key.name
            return join([answers.facts(ask.domain.noun, record[key], [(label, record[name])]) for record in result])
        case "create":
            return answers.created(ask.domain, result)
        case "update":
            return answers.updated(ask.domain, result, ask.key, ask.columns)
        case "delete":
            return answers.deleted(ask.domain, ask.key)


def think(ask: Ask, result: Any) -> str:
    """The thought that follows from the result."""
    error = error_of(result)
    if error is not None:
        reason = (
            "It failed twice."
            if busy(ask.operation, result)
            else f"There is no {ask.domain.noun} {ask.key}."
            if error.startswith("not found")
            else "It is refused."
        )
        return f"{reason} I tell the user."
    if ask.kind == "facts":
        return f"The result has {phrases.listed(ask.columns)}."
    return answers.think_hits(ask.domain, result) if isinstance(result, list) else "Done. I tell the user."


def join(said: list[answers.Said]) -> answers.Said:
    """Join several answers; repeated sentences appear once."""
    return " ".join(dict.fromkeys(text for text, _ in said)), [word for _, says in said for word in says]


def perform(play: Play, asks: list[Ask], text: str, *, thought: str | None = None) -> list[Any]:
    """A whole turn: the user's text, the calls of all asks in one message, one answer. Returns the results."""
    play.begin(text)
    at_hand = [known(play, ask) for ask in asks]
    calls = [ask for ask, record in zip(asks, at_hand, strict=True) if record is None]
    wish = phrases.listed([ask.wish for ask in asks])
    made = (
        play.call(
            thought or answers.think_call(wish, [ask.operation for ask in calls]),
            [(ask.operation, ask.arguments) for ask in calls],
        )
        if calls
        else []
    )
    left = iter(made)
    results = [record if record is not None else next(left) for record in at_hand]
    thoughts = [
        think(ask, result) for ask, result, record in zip(asks, results, at_hand, strict=True) if record is None
    ]
    ending = " ".join(dict.fromkeys(thoughts)) if calls else f"The user wants {wish}. An earlier result has it."
    play.finish(ending, join([say(ask, result) for ask, result in zip(asks, results, strict=True)]), may_look_up=True)
    remember(play, asks, results)
    return results


def remember(play: Play, asks: list[Ask], results: list[Any]) -> None:
    """The record that the next turn can refer to as `it`."""
    play.gave_up = any(busy(ask.operation, result) for ask, result in zip(asks, results, strict=True))
    play.last = asks[0] if len(asks) == 1 else None
    if len(asks) != 1 or error_of(results[0]) is not None or isinstance(asks[0].operation.action, (Delete, Calculate)):
        return
    ask, result = asks[0], results[0]
    record = result[0] if isinstance(result, list) and len(result) == 1 else result
    if isinstance(record, dict) and ask.domain.key.name in record:
        play.focus = (ask.domain, str(record[ask.domain.key.name]))
        play.asked = ask.columns if ask.kind == "facts" else []
