"""The assistant's texts: answers and thoughts that follow from the context, one form for each kind of turn.

These are training targets, so nothing here is random. Independent of users' wordings and of the simulated tools.
"""

from __future__ import annotations

from typing import Any

from agentspec.replay.world import Record
from scripts.tiny_agent.domain import Column, Domain, Operation
from scripts.tiny_agent.phrases import listed

Said = tuple[str, list[str]]
"""An answer, and the texts that a correct answer must contain."""


def shown(value: Any) -> str:
    """A value in an answer: as in the result, lists in words, flags as yes and no, without the full stop that ends a
    text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return listed([str(item) for item in value]) if value else "none"
    return "none" if value is None else str(value).rstrip(".")


def essential(value: Any, before: str) -> list[str]:
    """The text that an answer must contain for a value; very short values together with the word before them."""
    if isinstance(value, list) and value:
        return [str(item) for item in value]
    text = shown(value)
    return [text if len(text) > 3 else f"{before} {text}"]


def label_of(domain: Domain, column: str) -> str:
    found = next((c for c in (domain.key, *domain.columns) if c.name == column), None)
    return found.label if found is not None else column.replace("_", " ")


def facts(noun: str, key: Any, pairs: list[tuple[str, Any]]) -> Said:
    """`pairs`: labels and values."""
    said = []
    for i, (label, value) in enumerate(pairs):
        verb = "are" if isinstance(value, list) else "is"
        said.append(f"the {label}{f' of {noun} {key}' if i == 0 else ''} {verb} {shown(value)}")
    text = listed(said)
    return text[0].upper() + text[1:] + ".", [item for _, value in pairs for item in essential(value, "is")]


def _hit(domain: Domain, record: Record) -> str:
    """The key and the first two short values, in the result's order."""
    short = [c.name for c in domain.columns if c.kind not in ("text", "page", "people", "tags", "flag")]
    short = [name for name in record if name in short][:2]
    key = str(record[domain.key.name])
    return f"{key} ({', '.join(shown(record[name]) for name in short)})" if short else key


def hits(domain: Domain, records: list[Record]) -> Said:
    if not records:
        return f"I found no {domain.plural}.", [f"no {domain.plural}"]
    noun = domain.noun if len(records) == 1 else domain.plural
    return f"I found {len(records)} {noun}: {listed([_hit(domain, r) for r in records])}.", [
        str(r[domain.key.name]) for r in records
    ]


def count(domain: Domain, num: int) -> Said:
    text = f"is 1 {domain.noun}" if num == 1 else f"are {num or 'no'} {domain.plural}"
    return f"There {text}.", [text.split(" ", 1)[1]]


def created(domain: Domain, record: Record) -> Said:
    key = str(record[domain.key.name])
    return f"I created {domain.noun} {key}.", [key]


def updated(domain: Domain, record: Record, key: Any, columns: list[str]) -> Said:
    """`columns`: those that the call has changed."""
    pairs = [(label_of(domain, name), record[name]) for name in columns if name in record]
    changed = listed(
        [f"the {label} {'are' if isinstance(value, list) else 'is'} now {shown(value)}" for label, value in pairs]
    )
    return f"I updated {domain.noun} {key}{': ' if changed else ''}{changed}.", [
        str(key),
        *(item for _, value in pairs for item in essential(value, "now")),
    ]


def deleted(domain: Domain, key: Any) -> Said:
    return f"I deleted {domain.noun} {key}.", [str(key), "deleted"]


def failed(domain: Domain, key: Any, error: str, busy: str | None) -> Said:
    """The answer to a failed call; `busy`: a temporary error, after a second try."""
    if error == busy:
        return f"I tried twice, but it didn't work: {error.rstrip('.')}.", ["twice"]
    if error.startswith("not found"):
        return f"I couldn't find {domain.noun} {key}.", ["couldn't find", str(key)]
    return f"I can't do that: {error.rstrip('.')}.", ["can't", str(key)] if str(key) in error else ["can't"]


def which_one(domain: Domain, records: list[Record]) -> Said:
    keys = [str(r[domain.key.name]) for r in records]
    return f"Which {domain.noun} do you mean: {', '.join(keys[:-1])} or {keys[-1]}?", keys


def missing(domain: Domain, columns: list[Column], key: Any = None) -> Said:
    labels = [c.label for c in columns]
    return f"Which {listed(labels)} should {'the ' + domain.noun if key is None else f'{domain.noun} {key}'} have?", [
        "?"
    ]


def unable(body: str) -> Said:
    return f"I can't {body}: I have no tool for that.", ["can't"]


def think_call(wish: str, operations: list[Operation]) -> str:
    names = [operation.name for operation in operations]
    if len(names) > 1 and len(set(names)) == 1:
        return f"The user wants {wish}. I call {names[0]} {len(names)} times."
    return f"The user wants {wish}. I call {listed(names)}."


def think_hits(domain: Domain, records: list[Record]) -> str:
    keys = [str(r[domain.key.name]) for r in records]
    return f"{len(keys)} hit{'s' if len(keys) > 1 else ''}: {', '.join(keys)}." if keys else "No hits."
