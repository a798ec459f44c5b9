"""The user's texts: requests in many wordings with the nouns, labels and values of a domain.

Wordings are templates: `(a|b)` is one of them, `[a]` is there or not, `{slot}` a value. Knows nothing of calls, answers
or state.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from scripts.tiny_agent import values
from scripts.tiny_agent.domain import Column, Kind

Tone = Literal["plain", "polite", "chatty", "terse", "casual"]
TONES: tuple[Tone, ...] = ("plain", "polite", "chatty", "terse", "casual")

_Node = str | tuple["_Sequence", ...]
"""Literal text, `{slot}`, or the alternatives of a choice."""
_Sequence = tuple[Any, ...]


@lru_cache(maxsize=4096)
def _parsed(template: str) -> _Sequence:
    tokens = re.findall(r"[()\[\]|]|\{\w+\}|[^()\[\]|{}]+", template)
    sequence, rest = _sequence(tokens, 0)
    assert rest == len(tokens), template
    return sequence


def _sequence(tokens: list[str], at: int) -> tuple[_Sequence, int]:
    nodes: list[_Node] = []
    while at < len(tokens) and tokens[at] not in (")", "]", "|"):
        if tokens[at] not in ("(", "["):
            nodes.append(tokens[at])
            at += 1
            continue
        optional = tokens[at] == "["
        choices: list[_Sequence] = []
        while tokens[at] not in (")", "]"):
            choice, at = _sequence(tokens, at + 1)
            choices.append(choice)
        nodes.append(((),) * len(choices) + tuple(choices) if optional else tuple(choices))
        at += 1
    return tuple(nodes), at


def _walk(rng: random.Random, sequence: _Sequence, slots: dict[str, str], out: list[str]) -> None:
    for node in sequence:
        if isinstance(node, tuple):
            _walk(rng, rng.choice(node), slots, out)
        elif node.startswith("{"):
            out.append(slots[node[1:-1]])
        else:
            out.append(node)


def expand(rng: random.Random, template: str, **slots: str) -> str:
    """One wording of the template; slot values are taken as they are."""
    out: list[str] = []
    _walk(rng, _parsed(template), slots, out)
    return "".join(out)


def one_of(rng: random.Random, templates: tuple[str, ...], **slots: str) -> str:
    return expand(rng, rng.choice(templates), **slots)


def article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeio" else f"a {noun}"


def listed(items: list[str]) -> str:
    """a, b and c."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def upper_first(text: str) -> str:
    """With a capital, unless a code or a path stands first: they must not change."""
    first = text.split(maxsplit=1)[0].rstrip(".,:;!?") if text.strip() else ""
    return text[:1].upper() + text[1:] if first.replace("'", "").isalpha() else text


_ORDERS: dict[Tone, tuple[str, ...]] = {
    "plain": (
        "{b}.",
        "{b}",
        "please {b}.",
        "I need you to {b}.",
        "can you {b}?",
        "{b}, please.",
        "I want to {b}.",
        "go ahead and {b}.",
        "[next, ]{b}.",
        "the next thing: {b}.",
    ),
    "polite": (
        "[hello, |hi, |good morning, ]could you (please |kindly |){b}?",
        "would you (please |be so kind and |mind? Please ){b}[?]",
        "please {b}[. Thank you|. Thanks|, thank you].",
        "I would like you to {b}[, please].",
        "I'd be glad if you could {b}.",
        "may I ask you to {b}?",
        "if you have a moment, please {b}.",
        "would it be possible to {b}?",
    ),
    "chatty": (
        "[hi there! |hey, |hello again! ][so, |ok, |well, ][busy day here. |I'm back. |sorry to bother you. |quick "
        "one. ]can you {b}?",
        "[I'm on the phone with somebody and ]I need your help: {b}[, would you]?",
        "my colleague reminded me that we should {b}. [Could you do that?|Please do it.]",
        "I've put this off for too long, so please {b}[ now].",
        "ok, here is what I need. Please {b}. [That's all.|That would be great.]",
        "[hey! ]I nearly forgot: {b}[, please].",
        "let's {b}, shall we?",
        "I was asked to {b}, so please do that.",
        "it would help me a lot if you could {b}[ right away].",
    ),
    "terse": ("{b}", "{b}", "{b}.", "pls {b}", "now {b}", "{b} [asap|now|thx]"),
    "casual": (
        "hey[,] (can|could) you {b}[?|? thx|? cheers]",
        "{b} [pls|please|thanks]",
        "gonna need you to {b}",
        "yo, {b}[ please]",
        "just {b}[, ok?]",
        "mind if I ask you to {b}?",
        "can u {b}[?]",
        "ok {b}",
    ),
}

_OURS = ("I want to", "we should", "let's", "I was asked")
"""Plural forms of requests: `let's tell me` is not English."""

_QUESTIONS: dict[Tone, tuple[str, ...]] = {
    "plain": (
        "{b}?",
        "{b}?",
        "I need to know: {b}?",
        "one question: {b}?",
        "please tell me: {b}?",
        "[next question: ]{b}?",
    ),
    "polite": (
        "[hello, |good morning, |excuse me, ]{b}[, please]?",
        "may I ask: {b}?",
        "could you tell me: {b}?",
        "I'd like to know: {b}? [Thank you.]",
    ),
    "chatty": (
        "[hi there! |hey, |hello again! ][so, |ok, |well, ][I'm a bit lost here. |I can't find my notes. |somebody "
        "just asked me. ]{b}?",
        "[I'm on the phone and ]I need a quick answer: {b}?",
        "quick question, {b}?",
        "remind me, {b}?",
        "I forgot again: {b}?",
        "I wonder, {b}?",
    ),
    "terse": ("{b}?", "{b}", "{b}?"),
    "casual": ("hey[,] {b}?", "{b}[ pls]?", "yo, {b}?", "any idea: {b}?", "ok so {b}?", "so, {b}?"),
}


def request(rng: random.Random, tone: Tone, body: str, *, question: bool = False) -> str:
    """A user's message around a request (`cancel order O-11`) or a question (`what is the city of order O-11`)."""
    templates = (_QUESTIONS if question else _ORDERS)[tone]
    if re.search(r"\bme\b", body):
        templates = tuple(template for template in templates if not any(ours in template for ours in _OURS))
    text = one_of(rng, templates, b=body)
    text = text.rstrip("?. " if "\n" in body else " ")
    careless = tone in ("terse", "casual") and rng.random() < 0.6
    return text if careless else upper_first(text)


def reference(rng: random.Random, noun: str, key_label: str, key: Any, *, bare: bool = True) -> str:
    """How a user names one record: `order O-11`, `the order with the order id O-11`, `O-11`."""
    forms = ("{n} {k}", "the {n} {k}", "{n} {k}", "[the ]{n} with [the ]{l} {k}", "{n}, {l} {k}", "{n} number {k}") + (
        "{k}",
    ) * 3 * bare
    if re.search(r"[./ ]", str(key)):
        forms = ("{n} {k}", "the {n} {k}") + ("{k}",) * bare
    return one_of(rng, forms, n=noun, l=key_label, k=str(key))


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the user passes on for a column."""

    column: Column
    value: Any
    said: str | None = None
    """Words that stand for the value (`me`, `today`, `the customer of order O-11`); None: the value itself."""


_BARE: dict[str, tuple[str, ...]] = {
    "person": ("for {v}",),
    "people": ("with {v}",),
    "city": ("in {v}",),
    "date": ("on {v}", "for {v}"),
    "time": ("at {v}",),
    "title": ("called {v}", "titled {v}", "named {v}"),
    "path": ("at {v}",),
}
_LABELLED = ("{l} {v}", "{l}: {v}", "{l} = {v}", "{l} {v}")


def quoted(rng: random.Random, column: Column, value: Any) -> str:
    """The value as people say it; text of several words stands in quotes where its end could be missed."""
    text = str(values.spoken(column, value))
    wordy = column.kind in ("title", "text", "page") or (column.kind == "word" and (" " in text or rng.random() < 0.3))
    if wordy and (" " in text or rng.random() < 0.5):
        return rng.choice(('"{}"', '"{}"', "'{}'", "“{}”") if "'" not in text else ('"{}"', "“{}”")).format(text)
    return text


def flag(rng: random.Random, label: str, value: bool) -> str:
    return one_of(
        rng, ("with {l}", "{l}: yes", "{l} on") if value else ("without {l}", "no {l}", "{l}: no", "{l} off"), l=label
    )


def parts(rng: random.Random, given: list[Given], kinds: list[Kind]) -> str:
    """What is given with a request, to stand behind it, with its leading space: ` for Ada Lowell, priority: high`, or
    lines.

    `kinds`: of all that could be given; where a kind is alone, its label isn't needed."""
    if not given:
        return ""
    given = rng.sample(given, len(given))
    style = rng.random()
    if style < 0.12 and len(given) > 1 and not any(g.said for g in given):
        bullet = rng.choice(("- ", "", "* "))
        return ":\n" + "\n".join(f"{bullet}{g.column.label}: {values.spoken(g.column, g.value)}" for g in given)
    said = []
    labelled = []
    for g in given:
        label = g.column.label
        text = g.said or quoted(rng, g.column, g.value)
        if g.column.kind == "flag":
            said.append(flag(rng, label, g.value))
        elif g.column.kind == "tags" and "tag" in label and rng.random() < 0.5:
            said.append(f"tagged {text}")
        elif (
            g.column.kind in _BARE
            and kinds.count(g.column.kind) == 1
            and rng.random() < 0.55
            and not (g.said and g.column.kind != "person")
        ):
            said.append(one_of(rng, _BARE[g.column.kind], v=text))
        elif style < 0.5:
            labelled.append(f"{label} {text}")
        else:
            said.append(
                ("with " if not any("with" in s for s in said) else "") + one_of(rng, _LABELLED, l=label, v=text)
            )
    if labelled:
        said.append("with " + listed(labelled))
    separator = rng.choice((", ", ", ", " "))
    if len(said) > 1 and rng.random() < 0.3:
        return " " + separator.join(said[:-1]) + " and " + said[-1]
    return rng.choice((" ", " ", ", ", ": ")) + separator.join(said)


_PARTS = ("with {v} in the {l}", "whose {l} contains {v}", "with {v} in {own} {l}", "where the {l} has {v} in it")
_EQUALS = ("with [the ]{l} {v}", "whose {l} is {v}", "where the {l} is {v}", "{have} {v} as [the ]{l}")
_ALONE: dict[str, tuple[str, ...]] = {
    "person": ("of {v}", "for {v}", "of {v}"),
    "city": ("in {v}",),
    "date": ("on {v}", "for {v}"),
    "time": ("at {v}",),
}


def filters(
    rng: random.Random, plural: str, given: list[Given], contains: set[str], kinds: list[Kind], *, one: bool = False
) -> str:
    """The records that the user means: `open orders of Ada Lowell`, `orders whose title contains "lamp"`.

    `contains`: columns searched for a part; `kinds`: of all that could be given; `one`: it is about one record."""
    before: list[str] = []
    behind: list[str] = []
    for g in given:
        text = g.said or quoted(rng, g.column, g.value)
        alone = kinds.count(g.column.kind) == 1
        if g.said == "me" and alone and not before and rng.random() < 0.5:
            before = ["my"]
        elif g.column.kind == "choice" and alone and " " not in text and not before and rng.random() < 0.45:
            before = [text]
        else:
            behind.append(_filter(rng, g, text, g.column.name in contains, alone, one))
    joined = [
        f"and {part}" if i and part.split()[0] in ("with", "whose", "where") else part for i, part in enumerate(behind)
    ]
    return " ".join([*before, plural, *joined])


def _filter(rng: random.Random, g: Given, text: str, contained: bool, alone: bool, one: bool) -> str:
    """One condition, to stand behind the noun."""
    kind = g.column.kind
    templates: tuple[str, ...] = _EQUALS
    if g.said == "me":
        templates = ("of mine", "for me", "with me as {l}") if alone else ("with me as {l}", "whose {l} is me")
    elif g.said == "today":
        templates = ("for today", "whose {l} is today") if alone else ("whose {l} is today", "with today as {l}")
    elif kind == "flag":
        templates = (
            ("with {l}", "where {l} is on", "with {l}: yes")
            if g.value
            else ("without {l}", "with no {l}", "where {l} is off")
        )
    elif contained and kind in ("title", "text", "page", "word", "path"):
        templates = _PARTS
    elif alone and rng.random() < 0.6:
        templates = _ALONE.get(kind, _EQUALS)
    own, have = ("its", "that has") if one else ("their", "that have")
    return one_of(rng, templates, l=g.column.label, v=text, own=own, have=have)


def which(rng: random.Random, noun: str, given: list[Given], contains: set[str], kinds: list[Kind]) -> str:
    """One record by what is known of it: `the order of Ada Lowell`, `my open order`."""
    text = filters(rng, noun, given, contains, kinds, one=True)
    return text if text.startswith("my ") else "the " + text


def settings(rng: random.Random, ref: str, word: str, given: list[Given], *, described: bool) -> str:
    """A change of a record: `set the due date of task T-1 to 2026-03-04 and the priority to high`.

    `described`: the record is named by values of its own, which must not look like new ones."""
    pairs = [(g.column.label, g.said or quoted(rng, g.column, g.value)) for g in given]
    if not described and rng.random() < 0.25:
        return one_of(
            rng,
            ("{w} {r}: {p}", "{w} {r} with {p}", "{w} {r}, new {p}"),
            w=word,
            r=ref,
            p=listed([f"{label} {text}" for label, text in pairs]),
        )
    verb = rng.choice(("change", "set", "update", "put", "move") if len(pairs) == 1 else ("change", "set", "update"))
    first, *rest = pairs
    head = one_of(
        rng,
        ("{w} the {l} of {r} to {v}", "{w} {l} of {r} to {v}", "{w} the {l} to {v} for {r}"),
        w=verb,
        l=first[0],
        r=ref,
        v=first[1],
    )
    return head + "".join(
        rng.choice((f" and the {label} to {text}", f" and {label} to {text}")) for label, text in rest
    )


def settings_of_it(rng: random.Random, given: list[Given]) -> str:
    g = given[0]
    text = g.said or quoted(rng, g.column, g.value)
    return one_of(
        rng,
        (
            "(change|set|update) its {l} to {v}",
            "(change|set) the {l} to {v}",
            "(change|set) the {l} of (it|that one) to {v}",
            "give it the {l} {v}",
        ),
        l=g.column.label,
        v=text,
    )
