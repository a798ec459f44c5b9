"""The parts of generated domains: nouns, columns, states and the verbs of tools, by split."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from scripts.tiny_agent import catalog, pools
from scripts.tiny_agent.domain import Column, Kind, Split, Verb
from scripts.tiny_agent.pools import Pool, made_up
from scripts.tiny_agent.template import Template


def _words_of(templates: Iterable[Template]) -> set[str]:
    """Nouns, labels and names of parameters of hand-written domains, as plain words."""
    found: set[str] = set()
    for template in templates:
        found |= {template.noun, template.noun.split()[-1]}
        for operation in template.operations:
            for name, column in operation.params.items():
                found |= {
                    column.label,
                    *(_WORD_START.sub(" ", text).replace("_", " ").lower() for text in (name, column.name)),
                }
    return found


_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")
_KNOWN = _words_of(catalog.TEMPLATES.values())
_RESERVED = _words_of(catalog.UNSEEN.values()) - _KNOWN

RECORD_NOUNS = Pool.of(pools.read_list("record_nouns"), known=_KNOWN, reserved=_RESERVED)


def _labels(labels: list[str]) -> Pool:
    """Labels by split. One that begins with a noun, such as `lot number`, may be the name of a key of such records: it
    goes where the noun is."""
    known = {label for label in labels if label.split()[0] in RECORD_NOUNS.train}
    reserved = {label for label in labels if label.split()[0] in RECORD_NOUNS.held_out} - _KNOWN
    return Pool.of(labels, known=_KNOWN | known, reserved=_RESERVED | reserved)


LABELS = {kind: _labels(labels) for kind, labels in pools.read_groups("labels").items()}
_ALL_LABELS = frozenset(label for pool in LABELS.values() for label in (*pool.train, *pool.held_out))
CHOICES = pools.read_groups("choices")
CHOICE_LABELS = Pool.of(list(CHOICES), known=_KNOWN, reserved=_RESERVED)

VERBS: dict[Verb, tuple[str, ...]] = {
    "get": ("get", "show", "fetch", "look up", "describe", "view", "retrieve", "check", "inspect", "read"),
    "read": ("read", "open", "print", "show"),
    "find": ("find", "search", "list", "query", "browse", "filter", "look up", "check", "get", "show"),
    "create": ("create", "add", "register", "book", "file", "schedule", "log", "make", "enter", "record"),
    "update": ("update", "change", "edit", "modify", "adjust", "revise", "correct", "amend"),
    "delete": ("delete", "remove", "drop", "discard", "erase", "purge"),
    "replace": ("edit", "patch", "rewrite", "correct"),
}
"""How a tool of each kind may be called; the states below have the words for `close`."""

ODD_VERBS = Pool.of(pools.read_list("odd_verbs"))
"""Verbs that fit any tool; the tool's description then gives its function."""

CLOSING = {
    "cancel": "cancelled", "close": "closed", "finish": "finished", "archive": "archived", "complete": "completed",
    "approve": "approved",
    "release": "released", "reject": "rejected", "retire": "retired", "settle": "settled", "suspend": "suspended",
    "confirm": "confirmed",
    "publish": "published", "resolve": "resolved", "seal": "sealed", "stop": "stopped", "decline": "declined",
    "dispatch": "dispatched",
    "withdraw": "withdrawn", "certify": "certified", "terminate": "terminated", "freeze": "frozen", "void": "void",
    "ship": "shipped",
}  # fmt: skip
"""Verb -> the state that it leaves for good."""
STARTING = (
    "open",
    "new",
    "active",
    "pending",
    "draft",
    "planned",
    "waiting",
    "ready",
    "running",
    "scheduled",
    "received",
    "live",
)
BETWEEN = (
    "on hold",
    "assigned",
    "checked",
    "started",
    "delayed",
    "in review",
    "paused",
    "blocked",
    "accepted",
    "in transit",
    "overdue",
)
STATE_LABELS: dict[Split, tuple[str, ...]] = {
    "train": ("status", "state", "stage", "progress", "status", "current state", "order status", "workflow step"),
    "held_out": ("phase", "standing", "lifecycle", "stand of affairs", "present phase", "milestone state"),
}
_LIMITS: dict[Split, tuple[str, ...]] = {
    "train": (
        "limit",
        "max results",
        "top",
        "max count",
        "first n",
        "result limit",
        "cap",
        "how many",
        "max rows",
        "size limit",
        "take",
    ),
    "held_out": ("max items", "page size", "at most", "num hits"),
}
_LIMIT_FORMS = ("max {}", "{} limit", "top {}", "num {}", "first {}", "{} cap")
_KEY_WORDS = ("id", "id", "number", "code", "reference", "key", "no", "tag", "handle", "ident", "symbol", "mark")
_OLD_NEW = (
    ("old", "new"), ("search", "replace with"), ("before", "after"), ("remove", "insert"), ("from", "to"),
    ("current", "replacement"),
    ("wrong", "right"), ("existing", "wanted"), ("find", "put"), ("source", "target"),
)  # fmt: skip
SHEETS = (
    "details",
    "card",
    "record",
    "data",
    "summary",
    "file",
    "view",
    "page",
    "report",
    "facts",
    "profile",
    "overview",
    "entry",
)
"""What may stand for the verb in the name of a tool that shows one record."""
FIND_FORMS = (
    *("{label}",) * 6, "by {label}", "filter {label}", "with {label}", "only {label}", "where {label}", "match {label}",
    "{label} is", "{label} filter", "{label} wanted", "{noun} {label}", "{label} of {noun}",
)  # fmt: skip
UPDATE_FORMS = (
    *("{label}",) * 3, "new {label}", "new {label}", "set {label}", "to {label}", "updated {label}", "next {label}",
    "change {label}",
    "{label} now", "{label} after", "{label} of next {noun}", "{label} to set", "{label} from now on",
    "other {label}", "{label} changed",
)  # fmt: skip
_AROUND = (
    "{last} of {noun}", "{last} of {noun}", "{noun} {last}", "{first} until", "{first} at", "{first} by", "{last} on",
    "{first} from", "{first} as",
    "is {first}", "{first} through", "{last} in use", "the {last}", "{first} since", "{last} for {noun}", "{first} set",
)  # fmt: skip
_LINKS = ("of", "by", "until", "at", "for", "with", "from", "to", "and", "per")
_PARTS = ("", "", "text", "line", "part", "piece", "string", "value")
TEXT_LABELS: dict[Split, tuple[str, ...]] = {
    "train": ("content", "body", "log", "transcript", "full text", "protocol", "listing"),
    "held_out": ("dossier text", "long form", "write-up", "record sheet"),
}

_KIND_WEIGHTS: dict[Kind, int] = {
    "person": 6, "word": 6, "date": 5, "count": 5, "choice": 4, "amount": 3, "city": 3, "title": 3, "flag": 3,
    "text": 2, "time": 2, "code": 2, "tags": 2, "email": 1, "phone": 1, "path": 1, "people": 1,
}  # fmt: skip
_KINDS = tuple(kind for kind, weight in _KIND_WEIGHTS.items() for _ in range(weight))
_GENERIC: dict[Kind, tuple[str, ...]] = {
    "person": ("owner", "lead", "agent", "keeper", "contact", "chief"),
    "people": ("people", "members", "helpers"),
    "word": ("type", "kind", "name", "brand", "source"),
    "date": ("date", "day", "deadline"),
    "time": ("time", "hour"),
    "count": ("count", "level", "size", "number", "points"),
    "amount": ("price", "cost", "rate", "fee", "value"),
    "city": ("city", "town", "place"),
    "title": ("title", "heading", "caption"),
    "text": ("note", "comment", "remark", "story"),
    "choice": ("class", "mode", "grade", "band"),
    "code": ("code", "number", "key"),
    "email": ("email", "mailbox"),
    "phone": ("phone", "hotline"),
    "path": ("file", "path"),
    "tags": ("tags", "labels", "words"),
}
_MADE_UP_NOUN_RATE = 0.5
_MADE_UP_FIRST_RATE = 0.4
_GENERIC_RATE = 0.5


def noun(rng: random.Random, split: Split) -> str:
    """What the records are: a noun, often with a word before it, sometimes one that nobody knows."""
    base = made_up(rng, split, 2) if rng.random() < _MADE_UP_NOUN_RATE else rng.choice(RECORD_NOUNS.strict(split))
    if rng.random() < 0.5 or " " in base:
        return base
    before = (
        rng.choice(rng.choice((pools.NOUNS, pools.ADJECTIVES)).strict(split))
        if rng.random() >= _MADE_UP_FIRST_RATE
        else made_up(rng, split, 2)
    )
    return base if before == base else f"{before} {base}"


def plural(text: str) -> str:
    """The regular plural of a noun."""
    if text.endswith("y") and text[-2:-1] not in tuple("aeiou"):
        return text[:-1] + "ies"
    return text + ("es" if text.endswith(("s", "x", "z", "ch", "sh")) else "s")


def kind(rng: random.Random) -> Kind:
    return rng.choice(_KINDS)


def label(rng: random.Random, split: Split, kind: Kind) -> str:
    """What a column of this kind is called."""
    known = (CHOICE_LABELS if kind == "choice" else LABELS[kind]).strict(split)
    if known and rng.random() >= _GENERIC_RATE:
        return rng.choice(known)
    pool = rng.choice((pools.NOUNS, pools.ADJECTIVES)) if kind != "flag" else pools.ADJECTIVES
    while True:
        first = rng.choice(pool.strict(split)) if rng.random() >= _MADE_UP_FIRST_RATE else made_up(rng, split, 2)
        made = first if kind == "flag" else f"{first} {rng.choice(_GENERIC[kind])}"
        if made not in _ALL_LABELS and first not in RECORD_NOUNS.strict("held_out" if split == "train" else "train"):
            return made


def key_label(rng: random.Random, split: Split, noun: str) -> str:
    """What the key of such records is called."""
    return f"{noun.split()[-1]} {rng.choice(_KEY_WORDS) if rng.random() < 0.85 else made_up(rng, split, 2)}"


def turned(rng: random.Random, label: str, noun: str) -> str:
    """A name that says a part of the label in other words."""
    while (
        name := rng.choice(_AROUND).format(first=label.split()[0], last=label.split()[-1], noun=noun.split()[-1])
    ) in _RESERVED:
        pass
    return name


def other_name(rng: random.Random, split: Split) -> str:
    """An uninformative name."""
    while (name := " ".join(_other_parts(rng, split))) in _RESERVED:
        pass
    return name


def _other_parts(rng: random.Random, split: Split) -> list[str]:
    first = (
        rng.choice(rng.choice((pools.NOUNS, pools.ADJECTIVES)).strict(split))
        if rng.random() < 0.6
        else made_up(rng, split, 2)
    )
    second = rng.choice(pools.NOUNS.strict(split)) if rng.random() < 0.6 else made_up(rng, split, 2)
    link = rng.choice(_LINKS)
    return rng.choice(([first], [first, link], [first, link, second], [first, second]))


def limit(rng: random.Random, split: Split, plural: str) -> str:
    """The name of the parameter for the maximum number of results."""
    return rng.choice(_LIMITS[split]) if rng.random() < 0.6 else rng.choice(_LIMIT_FORMS).format(plural.split()[-1])


def old_and_new(rng: random.Random, split: Split) -> tuple[str, str]:
    """The names of the parameters for the old and the new text."""
    if split == "held_out" and rng.random() < 0.5:
        return "passage", "passage instead"
    old, new = rng.choice(_OLD_NEW)
    part = rng.choice(_PARTS) if split == "train" and rng.random() < 0.7 else made_up(rng, split, 2)
    return f"{old} {part}".strip(), f"{new} {part}".strip()


def own_verb(rng: random.Random, split: Split) -> str:
    """A verb without a specific meaning."""
    return rng.choice(ODD_VERBS.strict(split)) if rng.random() < 0.7 else made_up(rng, split, 2)


def choices(rng: random.Random, split: Split, label: str) -> tuple[str, ...]:
    """The values of a choice: its usual ones, or words from anywhere, so that the schema has to be read."""
    if label in CHOICES and rng.random() < 0.5:
        return tuple(CHOICES[label])
    words: dict[str, None] = {}
    while len(words) < rng.choice((2, 3, 3, 4)):
        words[pools.word(rng.choice((pools.NOUNS, pools.ADJECTIVES)), rng, split)] = None
    return tuple(words)


def key_form(rng: random.Random) -> str:
    """The form of a table's codes, which end in digits."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.choice((1, 1, 2, 2, 3))))
    start = rng.choice(
        (
            letters,
            letters,
            f"{letters}-",
            f"{letters}-",
            letters.lower(),
            f"{letters.lower()}-",
            f"{letters}/",
            f"{letters}_",
            "",
            "",
        )
    )
    return start + "#" * rng.choice((3, 3, 4, 4, 5, 6) if start else (4, 5, 6))


def state(rng: random.Random, split: Split, name: str, label: str) -> tuple[Column, str, str, str]:
    """A status column: itself, the state that records start with, the verb that closes them and the state that it
    leaves."""
    verb, closed = rng.choice(_CLOSING_ITEMS)
    if rng.random() < 0.3:
        verb = own_verb(rng, split)
        closed = made_up(rng, split, 2)
    elif rng.random() < 0.15:
        closed = made_up(rng, split, 2)
    start = rng.choice(STARTING)
    between = tuple(rng.sample(BETWEEN, rng.choice((0, 1, 1, 2))))
    return Column(name=name, label=label, kind="choice", choices=(start, *between, closed)), start, verb, closed


_CLOSING_ITEMS = tuple(CLOSING.items())
