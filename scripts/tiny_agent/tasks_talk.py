"""Turns that depend on the conversation: missing values, references back, impossible requests, and talk."""

from __future__ import annotations

from typing import Any

from agentspec.replay.world import Create, Get
from scripts.tiny_agent import answers, asks, chat, phrases, values
from scripts.tiny_agent.asks import Ask
from scripts.tiny_agent.domain import Column, Domain, Operation, Verb
from scripts.tiny_agent.play import Play
from scripts.tiny_agent.tasks_single import open_records, pick_record


def missing_value(play: Play) -> bool:
    """A new record without one or two of its required values; the next turn gives them."""
    found = [(d, o) for d, o in play.operations("create") if isinstance(o.action, Create) and o.required]
    if not found:
        return False
    domain, operation = play.rng.choice(found)
    num = 1 if len(operation.required) < 3 or play.rng.random() < 0.8 else 2
    gone = [name for name in operation.required if name in play.rng.sample(operation.required, num)]
    gone = [name for name in operation.params if name in gone]
    if not gone:
        return False
    ask = asks.create(play, domain, operation, without=tuple(gone))
    if ask is None:
        return False
    columns = [operation.params[name] for name in gone]
    _ask_for(play, ask, phrases.listed(gone), answers.missing(domain, columns))
    told = [asks.given(play, column, asks.fresh(play, column)) for column in columns]
    ask.arguments |= {name: g.value for name, g in zip(gone, told, strict=True)}
    _supply(play, ask, told)
    return True


def missing_setting(play: Play) -> bool:
    """A change without the new value; the next turn gives it."""
    picked = pick_record(play, "update")
    ask = asks.update(play, *picked) if picked is not None else None
    if picked is None or ask is None or len(ask.arguments) != 2:
        return False
    domain, operation, record = picked
    named = asks.naming(operation)
    assert named is not None
    name = next(name for name in ask.arguments if name != named[0])
    ref, _ = asks.refer(play, domain, operation, record)
    templates = (
        "(change|update|set) the {l} of {r}",
        "{r} needs (another|a new) {l}",
        "(change|update) {r}, it should have another {l}",
    )
    body = phrases.one_of(play.rng, templates, l=operation.params[name].label, r=ref)
    text = phrases.upper_first(body) + "." if "needs" in body else phrases.request(play.rng, play.setting.tone, body)
    _ask_for(play, ask, name, answers.missing(domain, [operation.params[name]], ask.key), text)
    _supply(play, ask, [asks.given(play, operation.params[name], ask.arguments[name])])
    return True


def missing_key(play: Play) -> bool:
    """A change of a record without saying which; the next turn gives its key."""
    picked = pick_record(play, "close", "delete", "get")
    if picked is None:
        return False
    domain, operation, record = picked
    named = asks.naming(operation)
    assert named is not None
    body: str
    if isinstance(operation.action, Get):
        ask = asks.facts(play, domain, operation, record)
        if ask is None or asks.known(play, ask) is not None:
            return False
        label = answers.label_of(domain, ask.columns[0])
        body = phrases.one_of(
            play.rng,
            ("(tell|give) me the {l} of {a}", "(look up|check) the {l} of {a}"),
            l=label,
            a=phrases.article(domain.noun),
        )
    else:
        records = open_records(play, domain, operation)
        ask = (
            asks.end(play, domain, operation, play.rng.choice(records), ref=phrases.article(domain.noun))
            if records
            else None
        )
        if ask is None:
            return False
        body = ask.order
    label = operation.params[named[0]].label
    play.begin(phrases.request(play.rng, play.setting.tone, body))
    play.finish(
        f"{operation.name} needs {named[0]}, which is missing. I ask.",
        (f"Which {domain.noun} do you mean? Please give me the {label}.", ["?"]),
    )
    _supply(play, ask, [phrases.Given(operation.params[named[0]], ask.key)])
    return True


def _ask_for(play: Play, ask: Ask, names: str, said: answers.Said, text: str | None = None) -> None:
    play.begin(text or phrases.request(play.rng, play.setting.tone, ask.order))
    verb = "are" if " and " in names else "is"
    what = f"a new {ask.domain.noun}" if ask.kind == "create" else ask.wish
    play.finish(f"The user wants {what}. {names} {verb} missing for {ask.operation.name}. I ask.", said)


def _supply(play: Play, ask: Ask, told: list[phrases.Given]) -> None:
    """The user gives what is missing, and the call is made."""
    if len(told) == 1:
        g = told[0]
        text = g.said or str(values.spoken(g.column, g.value))
        templates = (
            "{v}",
            "{v}",
            "{v}.",
            "{v}, please",
            "{l}: {v}",
            "the {l} is {v}",
            "it should be {v}",
            "oh, sorry: {v}",
            "take {v}",
            "make it {v}",
            "{l} {v}",
            "let's say {v}",
        )
        said = phrases.one_of(play.rng, templates, v=text, l=g.column.label)
    else:
        said = play.rng.choice((", ", " and ", "\n")).join(
            f"{g.column.label}: {g.said or values.spoken(g.column, g.value)}" for g in told
        )
    asks.perform(
        play,
        [ask],
        said if play.rng.random() < 0.5 else _capital(said, told),
        thought=f"Now I have {phrases.listed([_name(ask, g) for g in told])}. I call {ask.operation.name}.",
    )


def _name(ask: Ask, g: phrases.Given) -> str:
    return next(name for name, column in ask.operation.params.items() if column is g.column)


def _capital(said: str, told: list[phrases.Given]) -> str:
    """A capital at the beginning, unless a value stands there."""
    begins = [str(values.spoken(g.column, g.value)) for g in told]
    return said if any(said.startswith(text) for text in begins) else phrases.upper_first(said)


def _in_focus(play: Play, *verbs: Any) -> tuple[Domain, Operation, dict[str, Any]] | None:
    """A tool for the record that the last answer was about."""
    if play.focus is None:
        return None
    domain, key = play.focus
    record = play.record(domain, key)
    found = [o for o in domain.operations if o.verb in verbs and asks.naming(o) is not None]
    return (domain, play.rng.choice(found), record) if found and record is not None else None


def follow_fact(play: Play) -> bool:
    """Another column of the same record: `and its city?`"""
    picked = _in_focus(play, "get")
    ask = asks.facts(play, *picked) if picked is not None else None
    if ask is None or ask.columns == play.asked:
        return False
    label = answers.label_of(ask.domain, ask.columns[0])
    templates = (
        "and (what is |)(its|the) {l}?",
        "what is its {l}?",
        "and the {l}?",
        "what about (its|the) {l}?",
        "(tell|give) me its {l}, too",
        "what's the {l} of that {n}?",
        "also (its|the) {l}, please",
        "which {l} does it have?",
    )
    asks.perform(play, [ask], chat.cased(play.rng, phrases.one_of(play.rng, templates, l=label, n=ask.domain.noun)))
    return True


def follow_other(play: Play) -> bool:
    """The same question about another record: `and T-12?`"""
    if play.focus is None or not play.asked:
        return False
    domain, key = play.focus
    records = [r for r in play.records(domain) if str(r[domain.key.name]) != key]
    getter = next((o for o in domain.operations if o.verb == "get" and asks.naming(o) is not None), None)
    if not records or getter is None:
        return False
    record = play.rng.choice(records)
    columns = list(play.asked)
    ask = asks.facts(play, domain, getter, record, len(columns))
    if ask is None or any(name not in record for name in columns):
        return False
    labels = [answers.label_of(domain, name) for name in columns]
    ask.columns, ask.wish = columns, f"the {phrases.listed(labels)} of {domain.noun} {ask.key}"
    ref, _ = asks.refer(play, domain, getter, record)
    templates = (
        "and {r}?",
        "what about {r}?",
        "and (for|of) {r}?",
        "how about {r}?",
        "same for {r}[, please]",
        "and the same for {r}?",
        "now {r}",
        "the same question for {r}",
    )
    asks.perform(play, [ask], chat.cased(play.rng, phrases.one_of(play.rng, templates, r=ref)))
    return True


def follow_end(play: Play) -> bool:
    """`And now cancel it.`"""
    picked = _in_focus(play, "close", "delete")
    if picked is None or picked[2] not in open_records(play, picked[0], picked[1]):
        return False
    ref = play.rng.choice(("it", "it", f"that {picked[0].noun}", f"this {picked[0].noun}", "that one"))
    ask = asks.end(play, *picked, ref=ref)
    if ask is None:
        return False
    asks.perform(play, [ask], _now(play, ask.order))
    return True


def follow_update(play: Play) -> bool:
    """`Change its due date to 2026-03-04.`"""
    picked = _in_focus(play, "update")
    ask = (
        asks.update(play, *picked, ref=play.rng.choice(("it", "it", f"that {picked[0].noun}")))
        if picked is not None
        else None
    )
    if ask is None:
        return False
    asks.perform(play, [ask], _now(play, ask.order))
    return True


def _now(play: Play, order: str) -> str:
    templates = (
        "and now {o}",
        "(ok|good|great|fine|thanks), (now |then |)(please |){o}",
        "please {o}",
        "{o}[, please]",
        "then {o}[, please]",
        "can you {o}?",
        "now {o}[.]",
        "and {o}[.]",
    )
    text = phrases.one_of(play.rng, templates, o=order)
    return phrases.upper_first(text) if play.rng.random() < 0.7 else text


def refusal(play: Play) -> bool:
    """Something that none of the tools does."""
    body = _foreign(play) if play.setting.others and play.rng.random() < 0.55 else None
    body = body or _lacking(play) or _elsewhere(play)
    play.begin(phrases.request(play.rng, play.setting.tone, body))
    play.finish(f"The user wants to {body}. No tool does that.", answers.unable(body))
    return True


def _foreign(play: Play) -> str | None:
    """An order to tools of another session."""
    domain = play.rng.choice(play.setting.others)
    nouns = {d.noun.split()[-1].lower() for d in play.domains}
    if domain.noun.split()[-1].lower() in nouns or not domain.records:
        return None
    operation = play.rng.choice(domain.operations)
    record = play.rng.choice(domain.records)
    if operation.verb in ("get", "close", "delete", "update"):
        key = record[domain.key.name]
        if operation.verb != "get":
            return f"{operation.word} {play.rng.choice(('', 'the '))}{domain.noun} {key}"
        column = play.rng.choice(domain.columns)
        verb = play.rng.choice(("look up", "check", "find", "read out"))
        return f"{verb} the {column.label} of {domain.noun} {key}" if column.kind != "page" else None
    if operation.verb == "create":
        return f"{operation.word} {phrases.article(domain.noun)}"
    return (
        f"{play.rng.choice(('find', 'list', 'count'))} {play.rng.choice(('all ', 'the ', ''))}{domain.plural}"
        if operation.verb == "find"
        else None
    )


_ALTERNATIVES: dict[Verb, tuple[Verb, ...]] = {
    "delete": ("delete", "close"),
    "create": ("create",),
    "update": ("update", "close"),
}


def _lacking(play: Play) -> str | None:
    """A plausible order on the session's records that no tool supports."""
    found = [
        (d, verb)
        for d in play.domains
        if d.data is not None
        for verb, same in _ALTERNATIVES.items()
        if all(d.operation(v) is None for v in same)
    ]
    if not found or play.rng.random() < 0.3:
        return None
    domain, verb = play.rng.choice(found)
    if verb == "create":
        return phrases.one_of(play.rng, ("create a new {n}", "add a new {n}", "make a new {n}"), n=domain.noun)
    records = play.records(domain)
    if not records:
        return None
    key = str(play.rng.choice(records)[domain.key.name])
    if verb == "delete":
        return phrases.one_of(play.rng, ("(delete|remove) [the ]{n} {k}",), n=domain.noun, k=key)
    columns: list[Column] = [c for c in domain.columns if c.kind in ("city", "date", "time", "person", "word", "count")]
    if not columns or domain.operation("replace") is not None:
        return None
    column = play.rng.choice(columns)
    value = values.draw(column, play.rng, play.split)
    return phrases.one_of(
        play.rng, ("(change|set|update) the {l} of {n} {k} to {v}",), l=column.label, n=domain.noun, k=key, v=str(value)
    )


_ELSEWHERE = (
    "order (a pizza|some sushi|a coffee|lunch)[ for {p}]",
    "play (some music|a song|the radio|some jazz)",
    "call (a taxi|{p}|my mother|the police|my boss)",
    "book (a flight|a train|a hotel) to {c}",
    "turn (on|off) the (lights|heating|music|alarm)",
    "(paint|draw) (a picture|a portrait) of {p}",
    "water the plants",
    "translate this into (French|German|Latin)",
    "find out the weather in {c}",
    "check the (traffic|news|weather) in {c}",
    "write a (poem|song|letter) about {c}",
    "buy (a lottery ticket|flowers|some stocks|a new phone)[ for {p}]",
    "send (a fax|a parcel|a postcard|money) to {p}",
    "(print|scan|copy) (this page|my passport|a document)",
    "set (a timer|an alarm) for {t}",
    "feed the (cat|dog|fish)",
    "(open|lock|close) the (door|window|garage)",
    "hack into (the server of {p}|a bank|my neighbor's wifi)",
)


def _elsewhere(play: Play) -> str:
    columns = {
        "p": Column(name="", label="", kind="person"),
        "c": Column(name="", label="", kind="city"),
        "t": Column(name="", label="", kind="time"),
    }
    slots = {name: str(values.draw(column, play.rng, play.split)) for name, column in columns.items()}
    text = phrases.one_of(play.rng, _ELSEWHERE, **slots).strip()
    nouns = {word for d in play.domains for word in (*d.noun.lower().split(), *d.plural.lower().split())}
    return text if not nouns & set(text.lower().split()) else "water the plants"


def small_talk(play: Play) -> bool:
    """Greetings, thanks, questions about the assistant, small facts."""
    setting = play.setting
    roll = play.rng.random()
    if roll < 0.6:
        name, text, answer = chat.talk(play.rng, setting.tone)
        _talk(
            play,
            text,
            answer,
            "This is a small fact. No tool is needed." if name == "fact" else "This is small talk. No tool is needed.",
        )
    elif roll < 0.72:
        who = (
            f"I'm {setting.name}, an assistant that works with tools."
            if setting.name
            else "I'm tiny-agent, a small assistant that works with tools."
        )
        _talk(
            play,
            chat.cased(play.rng, phrases.one_of(play.rng, chat.WHO_ARE_YOU)),
            who,
            "The user asks who I am. No tool is needed.",
        )
    elif roll < 0.88:
        _talk(
            play,
            chat.cased(play.rng, phrases.one_of(play.rng, chat.WHAT_CAN_YOU_DO)),
            _abilities(play),
            "The user asks what I can do. I name what my tools are about.",
        )
    elif roll < 0.94:
        day = f"Today is {setting.today}." if setting.today else "I don't know today's date."
        _talk(
            play,
            chat.cased(play.rng, phrases.one_of(play.rng, chat.WHAT_DAY)),
            day,
            "The user asks for the date. No tool is needed.",
        )
    else:
        name = f"Your name is {setting.me}." if setting.me else "I don't know your name."
        _talk(
            play,
            chat.cased(play.rng, phrases.one_of(play.rng, chat.WHO_AM_I)),
            name,
            "The user asks for their name. No tool is needed.",
        )
    return True


def _abilities(play: Play) -> str:
    """The nouns of the tools, in the tools' order."""
    owners = [
        play.domain_of(o)
        for tool in play.setting.tools
        for d in play.domains
        for o in d.operations
        if o.name == tool["function"]["name"]
    ]
    return f"I can help you with these: {', '.join(dict.fromkeys(d.noun for d in owners))}."


def _talk(play: Play, text: str, answer: str, thought: str) -> None:
    play.begin(text)
    play.finish(thought, (answer, [answer.rstrip(".!?")]))


def try_again(play: Play) -> bool:
    """The user repeats a request after a tool that kept failing."""
    if not play.gave_up or play.last is None:
        return False
    ask = play.last
    templates = (
        "[please ](try|do it) again[.|, please|!]",
        "once more[, please|.]",
        "(can|could) you try (again|it once more|that again)?",
        "(ok, |)now try (again|once more)[.]",
        "again[, please]",
        "(one more time|give it another try)[, please|.]",
    )
    asks.perform(
        play,
        [ask],
        chat.cased(play.rng, phrases.one_of(play.rng, templates)),
        thought=f"The user wants me to try again. I call {ask.operation.name}.",
    )
    return True
