"""Turns of one request and one call: facts, lists, counts, new records, changes, ends, and records that don't exist."""

from __future__ import annotations

from typing import Any

from agentspec.replay.world import Delete, Find, Get, Record, Update
from scripts.tiny_agent import asks, phrases, values
from scripts.tiny_agent.asks import Ask
from scripts.tiny_agent.domain import Domain, Operation
from scripts.tiny_agent.play import Play

MAX_LISTED = 6
"""Records that an answer lists."""
MAX_COUNTED = 9


def worded(play: Play, ask: Ask) -> str:
    """The user's message for one ask."""
    question = ask.question is not None and play.rng.random() < 0.55
    return phrases.request(
        play.rng, play.setting.tone, ask.question if question and ask.question else ask.order, question=question
    )


def pick_record(play: Play, *verbs: Any, new: bool = False) -> tuple[Domain, Operation, Record] | None:
    """A tool that takes one record, and a record; `new`: rather one that no result has shown."""
    found = [
        (domain, operation)
        for domain, operation in play.operations(*verbs)
        if play.records(domain) and asks.naming(operation) is not None
    ]
    if not found:
        return None
    domain, operation = play.rng.choice(found)
    records = play.records(domain)
    unseen = [record for record in records if (domain.table, str(record[domain.key.name])) not in play.known]
    return domain, operation, play.rng.choice(unseen if unseen and (new or play.rng.random() < 0.7) else records)


def one_fact(play: Play) -> bool:
    return _facts(play, 1)


def several_facts(play: Play) -> bool:
    return _facts(play, play.rng.choice((2, 2, 3)))


def _facts(play: Play, num: int) -> bool:
    picked = pick_record(play, "get")
    ask = asks.facts(play, *picked, num) if picked is not None else None
    if ask is None:
        return False
    asks.perform(play, [ask], worded(play, ask))
    return True


def hits_of(play: Play, operation: Operation, domain: Domain, searched: list[phrases.Given]) -> list[Record]:
    """The records that a search will find."""
    action = operation.action
    assert isinstance(action, Find)
    names = {id(column): name for name, column in operation.params.items()}
    return [r for r in play.records(domain) if all(_fits(r, action, names[id(g.column)], g.value) for g in searched)]


def _fits(record: Record, action: Find, name: str, value: Any) -> bool:
    if name in action.match:
        held = record.get(action.match[name])
        return str(held).casefold() == str(value).casefold()
    held = record.get(action.contains[name])
    if isinstance(held, list):
        return any(str(item).casefold() == str(value).casefold() for item in held)
    return str(value).casefold() in str(held).casefold()


def search(
    play: Play, lowest: int, highest: int, num: int | None = None, only: Operation | None = None
) -> tuple[Domain, Operation, list[phrases.Given]] | None:
    """A search with that many hits."""
    found = [
        (domain, operation)
        for domain, operation in play.operations("find")
        if play.records(domain) and only in (None, operation)
    ]
    for domain, operation in play.rng.sample(found, len(found)):
        for _ in range(6):
            record = play.rng.choice(play.records(domain))
            searched = asks.searched(play, operation, record, num or play.rng.choice((1, 1, 1, 2)))
            if lowest == 0 and searched:
                i = play.rng.randrange(len(searched))
                searched[i] = phrases.Given(searched[i].column, asks.fresh(play, searched[i].column))
                if isinstance(searched[i].value, (list, bool)):
                    continue
            if searched and lowest <= len(hits_of(play, operation, domain, searched)) <= highest:
                return domain, operation, searched
    return None


def find(play: Play) -> bool:
    lowest, highest = play.rng.choice(((0, 0), (1, 1), (1, 1), (2, 4), (2, 4), (2, MAX_LISTED)))
    found = search(play, lowest, highest)
    if found is None:
        return False
    ask = asks.find(play, *found)
    asks.perform(play, [ask], worded(play, ask))
    return True


def find_all(play: Play) -> bool:
    """The whole table, or the first few of it."""
    found = [(d, o) for d, o in play.operations("find") if not o.required and play.records(d)]
    if not found:
        return False
    domain, operation = play.rng.choice(found)
    limit = play.rng.randint(1, 4) if getattr(operation.action, "limit", None) and play.rng.random() < 0.7 else None
    if limit is None and len(play.records(domain)) > MAX_LISTED:
        return False
    ask = asks.find(play, domain, operation, [], limit=limit)
    asks.perform(play, [ask], worded(play, ask))
    return True


def count(play: Play) -> bool:
    found = search(play, *play.rng.choice(((0, 0), (1, 1), (2, MAX_COUNTED), (2, MAX_COUNTED), (3, MAX_COUNTED))))
    if found is None:
        return False
    ask = asks.find(play, *found, counting=True)
    asks.perform(play, [ask], worded(play, ask))
    return True


_OF_HITS = (
    "(tell|give|show) me the {l} of {f}",
    "(look up|check|list|get) the {l} of {f}",
    "(find|search for|list) {f} and (tell|give) me the {l}",
)


def facts_of_hits(play: Play) -> bool:
    """A column of records that the user describes."""
    found = search(play, 1, 3)
    if found is None:
        return False
    domain, operation, searched = found
    ask = asks.find(play, domain, operation, searched)
    told = [g.column.name for g in searched]
    hits = hits_of(play, operation, domain, searched)
    columns = [
        c
        for c in asks.shown_columns(domain, operation, hits[0])
        if c.name not in told and all(c.name in hit for hit in hits)
    ]
    if not columns:
        return False
    column = play.rng.choice(columns)
    action = operation.action
    assert isinstance(action, Find)
    what = phrases.filters(
        play.rng,
        domain.plural,
        searched,
        {operation.params[name].name for name in action.contains if name in operation.params},
        asks.kinds(domain, operation),
    )
    question = play.rng.random() < 0.4
    templates = ("what is the {l} of {f}", "what are the {l} values of {f}") if question else _OF_HITS
    ask.kind, ask.columns, ask.wish = "facts_of_hits", [column.name], f"the {column.label} of {ask.wish}"
    body = phrases.one_of(play.rng, templates, l=column.label, f=what)
    asks.perform(play, [ask], phrases.request(play.rng, play.setting.tone, body, question=question))
    return True


def create(play: Play) -> bool:
    found = play.operations("create")
    ask = asks.create(play, *play.rng.choice(found)) if found else None
    if ask is None:
        return False
    asks.perform(play, [ask], worded(play, ask))
    return True


def update(play: Play) -> bool:
    picked = pick_record(play, "update")
    ask = asks.update(play, *picked, num=play.rng.choice((1, 1, 2))) if picked is not None else None
    if ask is None:
        return False
    asks.perform(play, [ask], worded(play, ask))
    return True


def end(play: Play) -> bool:
    """Closes or deletes a record; now and then one that is locked."""
    picked = pick_record(play, "close", "delete")
    if picked is None:
        return False
    domain, operation, _ = picked
    records = open_records(play, domain, operation)
    ask = asks.end(play, domain, operation, play.rng.choice(records)) if records else None
    if ask is None:
        return False
    asks.perform(play, [ask], worded(play, ask))
    return True


def locked(play: Play) -> bool:
    """A change that the tool refuses because of the record's state."""
    found = []
    for domain, operation in play.operations("update", "close", "delete"):
        lock = getattr(operation.action, "locked", None)
        if lock is not None and asks.naming(operation) is not None:
            found += [
                (domain, operation, record) for record in play.records(domain) if record.get(lock.column) in lock.values
            ]
    if not found:
        return False
    domain, operation, record = play.rng.choice(found)
    ask = (asks.update if operation.verb == "update" else asks.end)(play, domain, operation, record)
    if ask is None:
        return False
    asks.perform(play, [ask], worded(play, ask))
    return True


def open_records(play: Play, domain: Domain, operation: Operation) -> list[Record]:
    """Records that the operation would change."""
    fixed = operation.action.fixed if isinstance(operation.action, Update) else {}
    return [r for r in play.records(domain) if not fixed or any(r.get(name) != value for name, value in fixed.items())]


def not_found(play: Play) -> bool:
    """A record that doesn't exist."""
    picked = pick_record(play, "get", "get", "update", "close", "delete")
    if picked is None:
        return False
    domain, operation, record = picked
    found = asks.naming(operation)
    assert found is not None
    absent = {**record, found[1]: values.draw(asks.column_of(domain, found[1]), play.rng, play.split)}
    if any(r[found[1]] == absent[found[1]] for r in play.records(domain)):
        return False
    if isinstance(operation.action, Get):
        ask = asks.facts(play, domain, operation, absent)
    elif isinstance(operation.action, (Update, Delete)):
        ask = (asks.update if operation.verb == "update" else asks.end)(play, domain, operation, absent)
    else:
        ask = None
    if ask is None:
        return False
    asks.perform(play, [ask], worded(play, ask))
    return True
