"""Turns of several calls: in one message, or in sequence with values from earlier results."""

from __future__ import annotations

from typing import Any

from agentspec.replay.world import Create, Find, Get, Record, Update
from scripts.tiny_agent import answers, asks, phrases
from scripts.tiny_agent.asks import Ask
from scripts.tiny_agent.domain import Column, Domain, Operation
from scripts.tiny_agent.phrases import Given
from scripts.tiny_agent.play import Play, busy, error_of
from scripts.tiny_agent.tasks_single import hits_of, open_records, pick_record, search


def _new_records(play: Play, domain: Domain, num: int) -> list[Record]:
    """Records that no result has shown."""
    records = [r for r in play.records(domain) if (domain.table, str(r[domain.key.name])) not in play.known]
    return play.rng.sample(records, num) if len(records) >= num else []


def _three(items: list[str], rng_pick: int) -> str:
    return (
        (", ".join(items[:-1]) + (" and ", ", and ", " and also ")[rng_pick] + items[-1])
        if len(items) > 1
        else items[0]
    )


def parallel_facts(play: Play) -> bool:
    """The same column of two or three records."""
    found = [(d, o) for d, o in play.operations("get") if asks.naming(o) is not None]
    if not found:
        return False
    domain, operation = play.rng.choice(found)
    records = _new_records(play, domain, play.rng.choice((2, 2, 3)))
    if not records:
        return False
    first = asks.facts(play, domain, operation, records[0])
    if first is None:
        return False
    named = asks.naming(operation)
    assert named is not None
    keys = [str(record[named[1]]) for record in records]
    label = answers.label_of(domain, first.columns[0])
    several = [
        Ask(
            kind="facts",
            domain=domain,
            operation=operation,
            arguments={named[0]: record[named[1]]},
            order="",
            question=None,
            wish=f"the {label} of {domain.noun} {record[named[1]]}",
            key=record[named[1]],
            columns=first.columns,
        )
        for record in records
    ]
    names = _three([f"{domain.noun} {key}" for key in keys] if play.rng.random() < 0.3 else keys, play.rng.randrange(3))
    names = names if names.startswith(domain.noun) else f"{play.rng.choice(('', 'the '))}{domain.plural} {names}"
    templates = (
        "what is the {l} of {r}",
        "(tell|give) me the {l} of {r}",
        "(check|look up) the {l} (of|for) {r}",
        "(find out|get) the {l} of {r}",
    )
    body = phrases.one_of(play.rng, templates, l=label, r=names)
    asks.perform(play, several, phrases.request(play.rng, play.setting.tone, body, question=body.startswith("what")))
    return True


def parallel_ends(play: Play) -> bool:
    """Two or three records closed or deleted."""
    found = [(d, o) for d, o in play.operations("close", "delete") if asks.naming(o) is not None and len(o.params) == 1]
    if not found:
        return False
    domain, operation = play.rng.choice(found)
    records = open_records(play, domain, operation)
    if len(records) < 3:
        return False
    records = play.rng.sample(records, play.rng.choice((2, 2, 3)))
    several = [ask for record in records if (ask := asks.end(play, domain, operation, record)) is not None]
    if len(several) != len(records):
        return False
    names = _three([str(ask.key) for ask in several], play.rng.randrange(3))
    word = asks.word(play, operation, *(("delete", "remove") if operation.verb == "delete" else ()))
    body = f"{word} {play.rng.choice(('', 'the '))}{domain.plural} {names}"
    asks.perform(play, several, phrases.request(play.rng, play.setting.tone, body))
    return True


def parallel_creates(play: Play) -> bool:
    """Two new records of one kind."""
    found = play.operations("create")
    if not found:
        return False
    domain, operation = play.rng.choice(found)
    several = [ask for _ in range(2) if (ask := asks.create(play, domain, operation)) is not None]
    if len(several) != 2 or several[0].arguments == several[1].arguments or any("\n" in ask.order for ask in several):
        return False
    asks.perform(play, several, _both(play, several))
    return True


def parallel_mixed(play: Play) -> bool:
    """Two requests of different kinds in one message."""
    several: list[Ask] = []
    used: set[tuple[str, str]] = set()
    for _ in range(12):
        picked = pick_record(play, "get", "update", "close", "delete", new=True)
        found = play.operations("create")
        ask: Ask | None = None
        if found and play.rng.random() < 0.3:
            ask = asks.create(play, *play.rng.choice(found))
        elif picked is not None:
            domain, operation, record = picked
            place = (domain.table, str(record[domain.key.name]))
            if place in used or place in play.known:
                continue
            make: Any = {"get": asks.facts, "update": asks.update}.get(operation.verb, asks.end)
            ask = make(play, domain, operation, record)
            used.add(place)
        if (
            ask is not None
            and "\n" not in ask.order
            and all(ask.operation.name != other.operation.name for other in several)
        ):
            several.append(ask)
        if len(several) == 2:
            asks.perform(play, several, _both(play, several))
            return True
    return False


def _both(play: Play, several: list[Ask]) -> str:
    tone = play.setting.tone
    if play.rng.random() < 0.5:
        joint = play.rng.choice((" and ", " and also ", ", and then ", " and ", "; also "))
        return phrases.request(play.rng, tone, joint.join(ask.order for ask in several))
    templates = (
        "two things: {a}. {b}.",
        "please {a}. Then {b}.",
        "{a}. Also, {b}.",
        "first {a}, then {b}.",
        "1. {a}\n2. {b}",
        "{a}, please. And {b}.",
    )
    return phrases.upper_first(phrases.one_of(play.rng, templates, a=several[0].order, b=several[1].order))


def _described(play: Play, *verbs: Any) -> tuple[Domain, Operation, Operation] | None:
    """A domain with a search and a tool that takes one record by its key."""
    found = [
        (domain, find, operation)
        for domain, operation in play.operations(*verbs)
        for find in domain.operations
        if isinstance(find.action, Find)
        and asks.naming(operation) is not None
        and asks.naming(operation)[1] == domain.key.name  # type: ignore[index]
    ]
    return play.rng.choice(found) if found else None


def _search_in(play: Play, domain: Domain, finder: Operation, lowest: int, highest: int) -> list[Given] | None:
    """A search in this domain with that many hits."""
    for _ in range(8):
        found = search(play, lowest, highest, play.rng.choice((1, 1, 2)), only=finder)
        if found is not None and all(g.column.kind not in ("flag", "text", "page") for g in found[2]):
            return found[2]
    return None


def _change(play: Play, domain: Domain, operation: Operation, record: Record, ref: str | None) -> Ask | None:
    return (asks.update if operation.verb == "update" else asks.end)(play, domain, operation, record, ref=ref)


def find_then_change(play: Play) -> bool:
    """A change of the one record that the user describes: `cancel Marta's order`."""
    return _found_change(play, 1, 1)


def ambiguous(play: Play) -> bool:
    """A change of a record that the user describes, but two fit: the assistant asks which."""
    return _found_change(play, 2, 3)


def _found_change(play: Play, lowest: int, highest: int) -> bool:
    picked = _described(play, "update", "close", "close", "delete")
    if picked is None:
        return False
    domain, finder, operation = picked
    searched = _search_in(play, domain, finder, lowest, highest)
    if searched is None:
        return False
    contains = {finder.params[name].name for name in finder.action.contains if name in finder.params}  # type: ignore[union-attr]
    ref = phrases.which(play.rng, domain.noun, searched, contains, asks.kinds(domain, finder))
    fitting = [r for r in play.records(domain) if r in open_records(play, domain, operation)]
    target = next(
        (r for r in play.rng.sample(fitting, len(fitting)) if _is_hit(play, domain, finder, searched, r)), None
    )
    ask = _change(play, domain, operation, target, ref) if target is not None else None
    if ask is None:
        return False
    play.begin(phrases.request(play.rng, play.setting.tone, ask.order))
    by = phrases.listed([name for name, column in finder.params.items() if any(g.column is column for g in searched)])
    arguments = {name: g.value for name, column in finder.params.items() for g in searched if g.column is column}
    what = (
        f"to {operation.word} {phrases.article(domain.noun)}"
        if operation.verb != "update"
        else f"to change {phrases.article(domain.noun)}"
    )
    found = play.call(
        f"The user wants {what}. I need its {domain.key.label} first. I call {finder.name} by {by}.",
        [(finder, arguments)],
    )[0]
    if _over(play, domain, None, finder, found):
        return True
    keys = [str(r[domain.key.name]) for r in found]
    if len(keys) > 1:
        play.finish(f"{answers.think_hits(domain, found)} I ask which one.", answers.which_one(domain, found))
        play.begin(_choice(play, domain, keys, str(ask.key)))
        _finish_change(play, ask, f"It is {ask.key}. I call {operation.name}.")
        return True
    _finish_change(play, ask, f"{answers.think_hits(domain, found)} I call {operation.name}.")
    return True


def _is_hit(play: Play, domain: Domain, finder: Operation, searched: list[Given], record: Record) -> bool:
    return any(record is hit for hit in hits_of(play, finder, domain, searched))


def _choice(play: Play, domain: Domain, keys: list[str], key: str) -> str:
    ordinal = ("first", "second", "third")[keys.index(key)]
    templates = (
        "{k}",
        "{k}.",
        "{k}, please",
        "I mean {k}.",
        "the {o} one",
        "the {o} one, please.",
        "{n} {k}",
        "it's {k}",
        "that would be {k}",
        "take {k}",
        "the {o}",
    )
    text = phrases.one_of(play.rng, templates, k=key, o=ordinal, n=domain.noun)
    return text if play.rng.random() < 0.4 or text.startswith(key) else phrases.upper_first(text)


def _finish_change(play: Play, ask: Ask, thought: str) -> None:
    result = play.call(thought, [(ask.operation, ask.arguments)])[0]
    play.finish(asks.think(ask, result), asks.say(ask, result))
    asks.remember(play, [ask], [result])


def _over(play: Play, domain: Domain, key: Any, operation: Operation, result: Any) -> bool:
    """Whether the first call failed; ends the turn in that case."""
    error = error_of(result)
    if error is not None:
        failing = busy(operation, result)
        reason = "It failed twice." if failing else f"There is no {domain.noun} {key}."
        play.finish(f"{reason} I tell the user.", answers.failed(domain, key, error, error if failing else None))
        play.gave_up = failing
        return True
    if result == []:
        play.finish("No hits. I tell the user.", answers.hits(domain, result))
        return True
    return False


def copy_to_new(play: Play) -> bool:
    """A value of one record goes into a new one of another kind."""
    sources = [
        (d, o)
        for d, o in play.operations("get")
        if isinstance(o.action, Get) and asks.naming(o) is not None and play.records(d)
    ]
    pairs = [
        (domain, operation, other, creator, name, column)
        for domain, operation in sources
        for other, creator in play.operations("create")
        if other is not domain and isinstance(creator.action, Create)
        for name, column in creator.params.items()
        if column.kind in ("person", "city", "email", "phone", "word", "title", "date", "people")
    ]
    for domain, operation, other, creator, name, column in play.rng.sample(pairs, min(6, len(pairs))):
        records = _new_records(play, domain, 1)
        if not records:
            continue
        sources_columns = [c for c in asks.shown_columns(domain, operation, records[0]) if c.kind == column.kind]
        if not sources_columns:
            continue
        source = play.rng.choice(sources_columns)
        ref, key = asks.refer(play, domain, operation, records[0])
        said = Given(column, records[0][source.name], _words_for(play, source, ref))
        ask = asks.create(play, other, creator, said={name: said})
        if ask is None or "\n" in ask.order:
            continue
        return _copy(play, domain, operation, key, source, ask, phrases.request(play.rng, play.setting.tone, ask.order))
    return False


def copy_to_record(play: Play) -> bool:
    """A value of one record goes into another one."""
    sources = [(d, o) for d, o in play.operations("get") if asks.naming(o) is not None and play.records(d)]
    targets = [
        (d, o)
        for d, o in play.operations("update")
        if isinstance(o.action, Update) and asks.naming(o) is not None and len(play.records(d)) > 1
    ]
    if not sources or not targets:
        return False
    for _ in range(6):
        domain, operation = play.rng.choice(sources)
        other, changer = play.rng.choice(targets)
        records, found = _new_records(play, domain, 1), _new_records(play, other, 1)
        if not records or not found or records[0] is found[0] or set(changer.required) - {asks.naming(changer)[0]}:  # type: ignore[index]
            continue
        columns = [
            (c, name) for c in asks.shown_columns(domain, operation, records[0]) for name in changer.action.set  # type: ignore[union-attr]
            if name in changer.params and changer.params[name].kind == c.kind and c.kind not in ("flag", "choice",
            "text")
        ]  # fmt: skip
        if not columns:
            continue
        source, name = play.rng.choice(columns)
        ref, key = asks.refer(play, domain, operation, records[0])
        said = Given(changer.params[name], records[0][source.name], _words_for(play, source, ref))
        ask = asks.update(play, other, changer, found[0], said={name: said})
        if ask is None or records[0][source.name] == found[0].get(changer.action.set[name]):  # type: ignore[union-attr]
            continue
        return _copy(play, domain, operation, key, source, ask, phrases.request(play.rng, play.setting.tone, ask.order))
    return False


def _words_for(play: Play, source: Column, ref: str) -> str:
    return phrases.one_of(play.rng, ("the {l} of {r}", "the {l} of {r}", "the same {l} as {r}"), l=source.label, r=ref)


def _copy(play: Play, domain: Domain, operation: Operation, key: Any, source: Column, ask: Ask, text: str) -> bool:
    named = asks.naming(operation)
    assert named is not None
    play.begin(text)
    thought = (
        f"The user wants {ask.wish}. I need the {source.label} of {domain.noun} {key} first. I call {operation.name}."
    )
    result = play.call(thought, [(operation, {named[0]: key})])[0]
    if not _over(play, domain, key, operation, result):
        _finish_change(play, ask, f"The result has {source.name}. I call {ask.operation.name}.")
    return True
