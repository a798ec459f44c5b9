"""Turns about long texts: a fact read from a page, a line's value replaced."""

from __future__ import annotations

from agentspec.replay.world import Get, Record, Replace
from scripts.tiny_agent import answers, asks, phrases, values
from scripts.tiny_agent.domain import Column, Domain, Kind, Operation
from scripts.tiny_agent.play import Play, busy, error_of
from scripts.tiny_agent.tasks_single import pick_record

_READ_QUESTIONS = (
    "(what is|what's) the {l} in {r}",
    "what does {r} say about the {l}",
    "(what|which) {l} does {r} (give|name|have)",
    "according to {r}, what is the {l}",
    "(what is|what's) the {l} according to {r}",
    "(what|which) {l} stands in {r}",
)
_READ_ORDERS = (
    "(read|open|check|look into) {r} and tell me the {l}",
    "(tell|give) me the {l} (from|in) {r}",
    "find the {l} in {r}",
    "look up the {l} in {r}",
    "{w} {r} and (tell|give) me the {l}",
)
_REPLACE_ORDERS = (
    "(change|set|update) the {l} in {r} to {v}",
    "(change|set) the {l} to {v} in {r}",
    "(edit|update) {r} so that the {l} is {v}",
    "(open|edit) {r} and (change|set) the {l} to {v}",
    "(edit|correct) {r}: the {l} should be {v}",
    "{w} the {l} in {r} with {v}",
)


def _page_column(domain: Domain) -> Column | None:
    return next((column for column in domain.columns if column.kind == "page"), None)


def _known_page(play: Play, domain: Domain, key: str, column: Column) -> str | None:
    text = play.known.get((domain.table, key), {}).get(column.name)
    return text if isinstance(text, str) else None


def _picked(play: Play) -> tuple[Domain, Operation, Record, Column, tuple[str, str]] | None:
    """A tool that reads pages, a record, and one fact of its page."""
    picked = pick_record(play, "read")
    if picked is None or not isinstance(picked[1].action, Get):
        return None
    domain, operation, record = picked
    column = _page_column(domain)
    found = values.facts(str(record[column.name])) if column is not None else []
    return (domain, operation, record, column, play.rng.choice(found)) if column is not None and found else None


def _read(play: Play, domain: Domain, operation: Operation, key: str, wish: str) -> str | None:
    """The text of the page, from an earlier result or a call; None when the tool keeps failing and the turn has
    ended."""
    named = asks.naming(operation)
    assert named is not None
    result = play.call(f"The user wants {wish}. I call {operation.name}.", [(operation, {named[0]: key})])[0]
    error = error_of(result)
    if error is None:
        return ""
    play.finish(
        "It failed twice. I tell the user.",
        answers.failed(domain, key, error, error if busy(operation, result) else None),
    )
    play.gave_up = True
    return None


def read_fact(play: Play) -> bool:
    picked = _picked(play)
    if picked is None:
        return False
    domain, operation, record, column, (label, value) = picked
    ref, key = asks.refer(play, domain, operation, record)
    question = play.rng.random() < 0.6
    body = phrases.one_of(play.rng, _READ_QUESTIONS if question else _READ_ORDERS, l=label, r=ref, w=operation.word)
    play.begin(phrases.request(play.rng, play.setting.tone, body, question=question))
    wish = f"the {label} in {key}"
    thought = f"The user wants {wish}. An earlier result has it."
    if _known_page(play, domain, str(record[domain.key.name]), column) is None:
        if _read(play, domain, operation, key, wish) is None:
            return True
        thought = f"The text has the {label}."
    play.finish(thought, (f"The {label} in {key} is {value}.", answers.essential(value, "is")), may_look_up=True)
    return True


def replace_line(play: Play) -> bool:
    """Reads a page, then replaces the line with a fact by one with another value."""
    picked = _picked(play)
    if picked is None:
        return False
    domain, operation, record, column, (label, value) = picked
    editor = next((o for o in domain.operations if isinstance(o.action, Replace) and asks.naming(o) is not None), None)
    if editor is None:
        return False
    line = values.fact_lines(str(record[column.name]))[label]
    new = _other(play, value)
    before, _, after = line.rpartition(value)
    if new == value or str(record[column.name]).count(line) != 1:
        return False
    ref, key = asks.refer(play, domain, operation, record)
    play.begin(
        phrases.request(
            play.rng, play.setting.tone, phrases.one_of(play.rng, _REPLACE_ORDERS, l=label, r=ref, v=new, w=editor.word)
        )
    )
    wish = f"another {label} in {key}"
    thought = f"The user wants {wish}. An earlier result has its text. I call {editor.name}."
    if _known_page(play, domain, str(record[domain.key.name]), column) is None:
        if _read(play, domain, operation, key, wish) is None:
            return True
        thought = f"The text has the {label}. I call {editor.name} with the old and the new line."
    action = editor.action
    assert isinstance(action, Replace)
    named = asks.naming(editor)
    assert named is not None
    arguments = {named[0]: record[named[1]], action.old: line, action.new: before + new + after}
    result = play.call(thought, [(editor, arguments)])[0]
    error = error_of(result)
    if error is not None:
        play.finish(
            "It failed twice. I tell the user.",
            answers.failed(domain, key, error, error if busy(editor, result) else None),
        )
        play.gave_up = busy(editor, result)
        return True
    play.finish(
        "Done. I tell the user.",
        (f"I updated {key}: the {label} is now {new}.", [str(key), *answers.essential(new, "now")]),
    )
    return True


def _other(play: Play, value: str) -> str:
    """Another value of the same sort: a number for a number, words for words."""
    if value.isdigit():
        return str(play.rng.randint(1, 10 ** len(value)))
    if value.replace(".", "", 1).isdigit():
        return f"{play.rng.randint(1, 99)}.{play.rng.randint(1, 9)}"
    if len(value) == 5 and value[2] == ":":
        return str(values.draw(Column(name="", label="", kind="time"), play.rng, play.split))
    kind: Kind = (
        play.rng.choice(("word", "city", "person")) if value[:1].isupper() and not value[-1].isdigit() else "word"
    )
    drawn = str(values.draw(Column(name="", label="", kind=kind), play.rng, play.split))
    return (
        drawn
        if not value[-1].isdigit()
        else values.draw(Column(name="", label="", kind="code", form="@@-###"), play.rng, play.split)
    )
