"""Generated domains: a noun, its columns and tools, with varying names and descriptions, so that the model must read
the schemas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.replay.world import Locked
from scripts.tiny_agent import invented_words as words
from scripts.tiny_agent import pools, toolset
from scripts.tiny_agent.domain import Column, Domain, Kind, Operation, Split, Verb
from scripts.tiny_agent.toolset import Toolset

_DESCRIPTIONS: dict[Verb, tuple[str, ...]] = {
    "get": (
        "{Word} one {noun} by its {key}.", "{Word} a single {noun}.", "{Word} the {noun} with this {key}.",
        "{Word} everything known about one {noun}.", "{Word} all details of one {noun}, given its {key}.",
    ),
    "read": ("{Word} the {text} of one {noun}.", "{Word} one {noun} with its whole {text}."),
    "find": (
        "{Word} {plural}.", "{Word} {plural}; all filters are optional.", "{Word} the {plural} that match all given "
        "filters.",
        "{Word} {plural}, all of them when no filter is given.", "{Word} {plural} and return a short list.",
    ),
    "create": ("{Word} one new {noun}.", "{Word} another {noun}.", "{Word} a further {noun} and return "
    "it.", "{Word} one more {noun} in the system."),
    "update": (
        "{Word} one {noun}.", "{Word} details of one {noun}. Only what is given "
        "changes.", "{Word} columns of the {noun} with this {key}.",
        "{Word} one {noun}: give the new values.",
    ),
    "close": (
        "{Word} one {noun}.", "{Word} one {noun} for good.", "{Word} one {noun}; its {state} becomes "
        "{closed}.", "{Word} the {noun} with this {key}.",
    ),
    "delete": ("{Word} one {noun}.", "{Word} one {noun} for good.", "{Word} the {noun} with this {key}.",
               "{Word} one {noun}; this can't be undone."),
    "replace": (
        "{Word} the {text} of one {noun}: one passage takes the place of another.",
        "{Word} a passage in the {text} of one {noun}; it must occur exactly once.",
    ),
}  # fmt: skip
_OWN_DESCRIPTIONS: dict[Verb, tuple[str, ...]] = {
    "get": ("{Word} one {noun}: returns all its details.", "{Word} a single {noun} to see everything about "
    "it.", "{Word} one {noun}."),
    "find": ("{Word} {plural}: returns those that "
    "match.", "{Word} {plural} to get a list of them.", "{Word} {plural}."),
    "create": ("{Word} a new {noun}: adds it to the others.", "{Word} one more {noun}.", "{Word} another {noun}."),
    "update": ("{Word} one {noun}: changes what is given.", "{Word} details of the {noun} with this {key}. Only "
    "what is given changes."),
    "close": (
        "{Word} one {noun}; its {state} becomes {closed}.", "{Word} the {noun} with this {key}: sets its {state} to "
        "{closed}.", "{Word} one {noun}.",
    ),
    "delete": ("{Word} one {noun}: removes it for good.", "{Word} the {noun} with this {key}, which removes "
    "it.", "{Word} one {noun} for good."),
}  # fmt: skip
"""Descriptions for verbs without a specific meaning."""
_COLUMN_TEXTS = (
    "{Label}",
    "{Label}",
    "{Label} of the {noun}",
    "The {label}",
    "{Label} of this {noun}",
    "The {noun}'s {label}",
)
_FLAG_TEXTS = ("Whether it is {label}", "{Label} or not", "{Label}: true or false", "True if the {noun} is {label}")
_FORMATS = {"date": (", YYYY-MM-DD", " as YYYY-MM-DD", " (YYYY-MM-DD)"), "time": (", HH:MM", " as HH:MM", " (HH:MM)")}
_FILTER_TEXTS = ("Only {plural} with this {label}", "{Label} to look for", "Filter by {label}", "{Label}")
_LOCK_TEXTS = (
    "{noun} {{key}} is {{value}}",
    "{{key}} is {{value}} and can't be changed",
    "not allowed: {noun} {{key}} is {{value}} already",
)
_OWN_VERB_RATE = 0.3
_ODD_NAME_RATE: dict[Split, float] = {"train": 0.35, "held_out": 0.05}
"""Uninformative tool names, more frequent in training than in practice, so that the model reads descriptions."""
_OTHER_NAME_RATE = 0.2
_OTHER_OBJECT_RATE = 0.12
"""Names whose object isn't the noun: lend_book makes a library loan."""
_SHEET_RATE = 0.15
"""Names without a verb, for tools that show one record."""
_OTHER_PARAM_RATE = 0.12
"""Parameters whose name has nothing of the label, which their description gives."""
_TURNED_NAME_RATE: dict[Split, float] = {"train": 0.2, "held_out": 0.0}
"""Columns whose name says the label in other words; the words around it are those of training."""
_SEARCHABLE: tuple[Kind, ...] = ("person", "city", "word", "date", "choice", "flag", "email", "code")
_INSIDE: tuple[Kind, ...] = ("title", "tags", "people")


@dataclass(frozen=True, slots=True)
class _Style:
    """How one domain names its tools and parameters."""

    tool_camel: bool
    param_camel: bool
    noun_first: bool
    short: bool
    """Whether tool names contain only the last word of the noun."""
    all_plural: bool
    """Whether all tool names contain the plural."""
    find_form: str
    """A filter's name, of the column's label."""
    update_form: str
    """A new value's name, of the column's label."""

    @classmethod
    def draw(cls, rng: random.Random) -> _Style:
        camel = rng.random() < 0.35
        return cls(
            tool_camel=camel,
            param_camel=camel if rng.random() < 0.8 else not camel,
            noun_first=rng.random() < 0.3,
            short=rng.random() < 0.25,
            all_plural=rng.random() < 0.15,
            find_form=rng.choice(words.FIND_FORMS),
            update_form=rng.choice(words.UPDATE_FORMS),
        )

    def param(self, text: str) -> str:
        return _joined(text, self.param_camel)

    def sheet(self, word: str, noun: str) -> str:
        return _joined(f"{noun.split()[-1] if self.short else noun} {word}", self.tool_camel)

    def tool(self, verb: str, noun: str) -> str:
        noun = noun.split()[-1] if self.short else noun
        return _joined(f"{noun} {verb}" if self.noun_first else f"{verb} {noun}", self.tool_camel)


def domain(rng: random.Random, split: Split) -> Domain:
    """Generate a domain. Held-out domains have nouns and columns whose words never occur in training, and are marked as
    unseen."""
    return _Maker(rng, split).domain()


class _Maker:
    """One domain while it is made up."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split: Split = split
        self.style = _Style.draw(rng)
        self.noun = words.noun(rng, split)
        self.plural = words.plural(self.noun)
        self.labels: list[str] = []
        self.names: set[str] = set()
        self.column_names: set[str] = set()
        self.state: Column | None = None
        self.page: Column | None = None
        self.key = self._key()
        self.columns = self._columns()
        self.short_list = (self.key.name, *(c.name for c in rng.sample(self._brief(), min(2, len(self._brief())))))
        self.tools = Toolset(_joined(self.plural, False), self.key, self.columns)
        self.locked = self._locked()

    def domain(self) -> Domain:
        rng = self.rng
        num_records = rng.randint(2, 5) if self.page is not None else rng.randint(3, 12)
        rows = toolset.records(rng, self.split, self.key, self.columns, num_records)
        return Domain(
            noun=self.noun,
            plural=self.plural,
            table=self.tools.table,
            key=self.key,
            columns=self.columns,
            operations=tuple(self._operation(verb) for verb in self._verbs()),
            data=toolset.table(self.key, rows),
            unseen=self.split == "held_out",
        )

    def _key(self) -> Column:
        rng = self.rng
        roll = rng.random()
        if roll < 0.84:
            label = words.key_label(rng, self.split, self.noun)
            if self.split == "train" and rng.random() < 0.25:
                label = rng.choice(("id", "number", "code", "reference", "key"))
            column = Column(name=self.style.param(label), label=label, kind="code", form=words.key_form(rng))
        else:
            label = "name" if self.split == "train" and rng.random() < 0.5 else f"{self.noun.split()[-1]} name"
            column = Column(name=self.style.param(label), label=label, kind="word" if roll < 0.94 else "city")
        self.labels.append(label)
        self.column_names.add(column.name)
        return self._described(column)

    def _columns(self) -> tuple[Column, ...]:
        rng, columns = self.rng, []
        for _ in range(rng.choice((2, 3, 3, 4, 4, 5, 6))):
            kind = words.kind(rng)
            label = self._label(kind)
            choices = words.choices(rng, self.split, label) if kind == "choice" else ()
            form = rng.choice(("@@-###", "##-####", "@####", "####@", "&&##", "@@@##")) if kind == "code" else ""
            columns.append(
                self._described(
                    Column(name=self._column_name(label), label=label, kind=kind, choices=choices, form=form)
                )
            )
        if rng.random() < 0.6:
            label = self._fresh(words.STATE_LABELS[self.split])
            self.state, self.start, self.closing, self.closed = words.state(
                rng, self.split, self._column_name(label), label
            )
            columns.insert(rng.randint(1, len(columns)), self.state)
        if rng.random() < 0.1:
            label = self._fresh(words.TEXT_LABELS[self.split])
            self.page = Column(name=self._column_name(label), label=label, kind="page")
            columns = [*columns[:2], self.page]
            if self.state is not None and self.state not in columns:
                self.state = None
        return tuple(columns)

    def _column_name(self, label: str) -> str:
        """The label, or words around a part of it; no two columns share a name."""
        rng = self.rng
        name = self.style.param(
            words.turned(rng, label, self.noun) if rng.random() < _TURNED_NAME_RATE[self.split] else label
        )
        name = self.style.param(label) if name in self.column_names else name
        self.column_names.add(name)
        return name

    def _param(self, form: str, label: str) -> str:
        """The name of a parameter for a column's value."""
        if self.rng.random() < _OTHER_PARAM_RATE:
            return self.style.param(words.other_name(self.rng, self.split))
        return self.style.param(form.format(label=label, noun=self.noun.split()[-1]))

    def _label(self, kind: Kind) -> str:
        """A label that holds no other one and is held by none, so that a question can mean only one column."""
        while True:
            label = words.label(self.rng, self.split, kind)
            if not any(label in other or other in label for other in self.labels):
                self.labels.append(label)
                return label

    def _fresh(self, labels: Sequence[str]) -> str:
        label = self.rng.choice([one for one in labels if one not in self.labels])
        self.labels.append(label)
        return label

    def _described(self, column: Column) -> Column:
        text = self.rng.choice(_FLAG_TEXTS if column.kind == "flag" else _COLUMN_TEXTS).format(
            Label=_capital(column.label), label=column.label, noun=self.noun
        )
        text += self.rng.choice(_FORMATS[column.kind]) if column.kind in _FORMATS else ""
        return Column(
            name=column.name,
            label=column.label,
            kind=column.kind,
            description=text,
            choices=column.choices,
            form=column.form,
        )

    def _brief(self) -> list[Column]:
        """Columns that are short enough for a list of records."""
        return [c for c in self.columns if c.kind not in ("text", "page", "people", "tags")]

    def _locked(self) -> Locked | None:
        if self.state is None or self.rng.random() < 0.5:
            return None
        return Locked(
            column=self.state.name, values=[self.closed], error=self.rng.choice(_LOCK_TEXTS).format(noun=self.noun)
        )

    def _verbs(self) -> list[Verb]:
        """Two to five kinds of tools; records can always be looked up in some way."""
        rng = self.rng
        rates: dict[Verb, float] = {
            "get": 0.85,
            "find": 0.75,
            "create": 0.65,
            "update": 0.65,
            "close": 0.75,
            "delete": 0.3,
        }
        if self.page is not None:
            rates = {"read": 1.0, "find": 0.6, "replace": 0.6, "update": 0.3, "delete": 0.2}
        if self.state is None:
            rates.pop("close", None)
        if not self._changeable():
            rates.pop("update", None)
        verbs = [verb for verb, rate in rates.items() if rng.random() < rate]
        if not {"get", "read", "find"} & set(verbs):
            verbs.append("get")
        if len(verbs) < 2:
            verbs.append("find" if "find" not in verbs else "delete")
        while len(verbs) > 5:
            verbs.remove(rng.choice(verbs[1:]))
        rng.shuffle(verbs)
        return verbs

    def _changeable(self) -> list[Column]:
        return [c for c in self.columns if c is not self.state and c.kind != "page"]

    def _operation(self, verb: Verb) -> Operation:
        rng = self.rng
        word, name = self._naming(verb)
        is_plain = word in words.VERBS.get(verb, ()) or word in words.CLOSING or verb not in _OWN_DESCRIPTIONS
        text = rng.choice((_DESCRIPTIONS if is_plain else _OWN_DESCRIPTIONS)[verb]).format(
            Word=_capital(word),
            noun=self.noun,
            plural=self.plural,
            key=self.key.label,
            text=self.page.label if self.page is not None else "",
            state=self.state.label if self.state is not None else "",
            closed=self.closed if self.state is not None else "",
        )
        by = {self.key.name: self.key.name}
        if self.split == "train" and self.key.kind == "code" and rng.random() < 0.1:
            by = {rng.choice(("id", "key", "ref")): self.key.name}
        match verb:
            case "get":
                return self.tools.get(name, word, text, by=by)
            case "read":
                return self.tools.get(name, word, text, by=by, verb="read")
            case "find":
                return self._find(name, word, text)
            case "create":
                return self._create(name, word, text)
            case "update":
                return self._update(name, word, text, by)
            case "close":
                assert self.state is not None
                show = self._after((self.state.name,))
                return self.tools.close(
                    name, word, text, {self.state.name: self.closed}, by=by, locked=self.locked, show=show
                )
            case "delete":
                return self.tools.delete(name, word, text, by=by, locked=self.locked if rng.random() < 0.5 else None)
            case "replace":
                return self._replace(name, word, text, by)
            case _:
                raise AssertionError(verb)

    def _naming(self, verb: Verb) -> tuple[str, str]:
        """The tool's verb as people say it and its name, which may have another verb, of the same meaning or not; no
        two tools share a name."""
        rng = self.rng
        while True:
            word = self.closing if verb == "close" else rng.choice(words.VERBS[verb])
            if verb in _OWN_DESCRIPTIONS and verb != "close" and rng.random() < _OWN_VERB_RATE:
                word = words.own_verb(rng, self.split)
            named = word
            if rng.random() < _ODD_NAME_RATE[self.split]:
                named = rng.choice(words.ODD_VERBS.strict(self.split))
            elif rng.random() < _OTHER_NAME_RATE and verb != "close":
                named = rng.choice(words.VERBS[verb])
            name = self._tool_name(verb, named)
            if name not in self.names:
                self.names.add(name)
                return word, name

    def _tool_name(self, verb: Verb, named: str) -> str:
        rng = self.rng
        is_plural = self.style.all_plural or (verb == "find" and rng.random() < 0.7)
        thing = self.plural if is_plural else self.noun
        if verb in ("get", "read") and rng.random() < _SHEET_RATE:
            return self.style.sheet(rng.choice(words.SHEETS), thing)
        if verb in ("create", "close", "update") and rng.random() < _OTHER_OBJECT_RATE:
            thing = rng.choice(pools.NOUNS.strict(self.split))
        return self.style.tool(named, thing)

    def _find(self, name: str, word: str, text: str) -> Operation:
        rng = self.rng
        searchable = [c for c in self.columns if c.kind in (*_SEARCHABLE, *_INSIDE)]
        match, contains, texts = {}, {}, {}
        for column in sorted(
            rng.sample(searchable, min(rng.choice((1, 2, 2, 3)), len(searchable))), key=self.columns.index
        ):
            if column.kind in _INSIDE:
                param = self.style.param(
                    f"{column.label} contains" if column.kind == "title" else f"has {column.label}"
                )
                contains[param] = column.name
            else:
                param = self._param(self.style.find_form, column.label)
                match[param] = column.name
                texts[param] = rng.choice(_FILTER_TEXTS).format(
                    plural=self.plural, label=column.label, Label=_capital(column.label)
                )
        limit = self.style.param(words.limit(rng, self.split, self.plural)) if rng.random() < 0.35 else None
        required = [next(iter(match))] if match and rng.random() < 0.2 else []
        return self.tools.find(
            name,
            word,
            text,
            match,
            contains=contains,
            limit=limit,
            required=required,
            show=self.short_list,
            texts=texts,
        )

    def _create(self, name: str, word: str, text: str) -> Operation:
        rng = self.rng
        given = {
            c.name if rng.random() >= _OTHER_PARAM_RATE else self._param("{label}", c.label): c.name
            for c in self._changeable()[:5]
        }
        required = list(given)[: rng.randint(1, min(3, len(given)))]
        if self.key.kind != "code":
            given, required = {self.key.name: self.key.name, **given}, [self.key.name, *required]
        return self.tools.create(
            name,
            word,
            text,
            given,
            required=required,
            fixed={self.state.name: self.start} if self.state is not None else {},
        )

    def _update(self, name: str, word: str, text: str, by: dict[str, str]) -> Operation:
        rng = self.rng
        chosen = sorted(
            rng.sample(self._changeable(), min(rng.choice((1, 2, 2, 3)), len(self._changeable()))),
            key=self.columns.index,
        )
        given = {self._param(self.style.update_form, c.label): c.name for c in chosen}
        required = list(given) if len(given) == 1 else []
        show = self._after([c.name for c in chosen])
        return self.tools.update(name, word, text, given, by=by, required=required, locked=self.locked, show=show)

    def _replace(self, name: str, word: str, text: str, by: dict[str, str]) -> Operation:
        assert self.page is not None
        old, new = (self.style.param(name) for name in words.old_and_new(self.rng, self.split))
        return self.tools.replace(name, word, text, self.page.name, old=old, new=new, by=by, show=(self.key.name,))

    def _after(self, changed: Sequence[str]) -> tuple[str, ...]:
        """What a change shows: the key and what changed, or the whole record when it is short."""
        return () if self.page is None and self.rng.random() < 0.3 else (self.key.name, *changed)


def _joined(text: str, camel: bool) -> str:
    parts = text.replace("-", " ").lower().split()
    return parts[0] + "".join(part.capitalize() for part in parts[1:]) if camel else "_".join(parts)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
