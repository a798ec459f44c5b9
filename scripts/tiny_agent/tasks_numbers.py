"""Turns with the calculator: an expression, the sum of two records, the sum of what a search finds."""

from __future__ import annotations

from typing import Any

from agentspec.replay.world import Calculate
from scripts.tiny_agent import answers, asks, phrases
from scripts.tiny_agent.domain import Column, Domain, Operation
from scripts.tiny_agent.play import Play, busy, error_of
from scripts.tiny_agent.tasks_single import hits_of, search

_WORDS = {
    "+": ("{a} plus {b}", "the sum of {a} and {b}", "{a} + {b}", "{a}+{b}"),
    "-": ("{a} minus {b}", "{a} - {b}", "{a} less {b}", "{a}-{b}"),
    "*": ("{a} times {b}", "{a} * {b}", "{a} multiplied by {b}", "the product of {a} and {b}"),
    "/": ("{a} divided by {b}", "{a} / {b}", "{a}/{b}", "{a} over {b}"),
}
_QUESTIONS = ("(what is|what's) {e}", "how much is {e}", "can you tell me what {e} is")
_ORDERS = ("(calculate|compute|work out) {e}", "(tell|give) me {e}", "figure out {e}", "{w} {e}")


def _operation(play: Play) -> Operation | None:
    found = play.operations("calculate")
    return found[0][1] if found else None


def _number(play: Play) -> str:
    rng = play.rng
    roll = rng.random()
    if roll < 0.5:
        return str(rng.randint(2, rng.choice((20, 100, 1000, 9999))))
    whole = rng.randint(1, rng.choice((20, 300, 2000)))
    return f"{whole}.{rng.randint(1, 9) if roll < 0.7 else f'{rng.randint(0, 9)}{rng.randint(1, 9)}'}"


def calculation(play: Play) -> bool:
    """Arithmetic alone."""
    operation = _operation(play)
    if operation is None:
        return False
    a, b, c = (_number(play) for _ in range(3))
    sign, second = play.rng.choice("+-*/"), play.rng.choice("+-*")
    expression = f"{a} {sign} {b}"
    words = phrases.one_of(play.rng, _WORDS[sign], a=a, b=b)
    if play.rng.random() < 0.25:
        bracket = play.rng.random() < 0.5
        expression = f"({expression}) {second} {c}" if bracket else f"{a} {sign} {b} {second} {c}"
        words = expression
    question = play.rng.random() < 0.6
    body = phrases.one_of(
        play.rng,
        _QUESTIONS if question else _ORDERS,
        e=words,
        w=operation.word if operation.word.isalpha() else "calculate",
    )
    play.begin(phrases.request(play.rng, play.setting.tone, body, question=question))
    _end(play, operation, f"The user wants a calculation. I call {operation.name}.", expression, "The result is {v}.")
    return True


def _end(play: Play, operation: Operation, thought: str, expression: str, form: str) -> None:
    action = operation.action
    assert isinstance(action, Calculate)
    result = play.call(thought, [(operation, {action.expression: expression})])[0]
    error = error_of(result)
    play.gave_up = busy(operation, result)
    if error is not None:
        play.finish(
            "It failed twice. I tell the user." if play.gave_up else "It is refused. I tell the user.",
            answers.failed(play.domain_of(operation), None, error, error if play.gave_up else None),
        )
    else:
        value = str(result["result"])
        play.finish("The result is there.", (form.format(v=value), [f"is {value}"]))


_SUM_QUESTIONS = (
    "what is the {l} of {r} (together|in total|added up)",
    "what is the total {l} of {r}",
    "what do the {l} of {r} add up to",
)
_SUM_ORDERS = (
    "add up the {l} of {r}",
    "(give|tell) me the total {l} of {r}",
    "(sum up|total) the {l} of {r}",
    "work out the sum of the {l} of {r}",
)


def _amounts(domain: Domain, operation: Operation) -> list[Column]:
    records = domain.records
    return (
        [c for c in asks.shown_columns(domain, operation, records[0]) if c.kind in ("amount", "count")]
        if records
        else []
    )


def sum_of_two(play: Play) -> bool:
    """Two records looked up in one message, then their sum."""
    operation = _operation(play)
    found = [(d, o) for d, o in play.operations("get") if asks.naming(o) is not None and _amounts(d, o)]
    if operation is None or not found:
        return False
    domain, getter = play.rng.choice(found)
    records = [r for r in play.records(domain) if (domain.table, str(r[domain.key.name])) not in play.known]
    column = play.rng.choice(_amounts(domain, getter))
    named = asks.naming(getter)
    if len(records) < 2 or named is None:
        return False
    pair = play.rng.sample(records, 2)
    keys = [str(r[named[1]]) for r in pair]
    names = (
        f"{domain.plural} {keys[0]} and {keys[1]}"
        if play.rng.random() < 0.6
        else f"{domain.noun} {keys[0]} and {domain.noun} {keys[1]}"
    )
    _begin_sum(play, column, names)
    thought = (
        f"The user wants the sum of {column.label} of {domain.noun} {keys[0]} and {keys[1]}. I call "
        f"{getter.name} 2 times."
    )
    results = play.call(thought, [(getter, {named[0]: r[named[1]]}) for r in pair])
    failing = next((result for result in results if error_of(result) is not None), None)
    if failing is not None:
        _give_up(play, domain, getter, failing)
        return True
    _end_sum(play, operation, [result[column.name] for result in results], column)
    return True


def sum_of_found(play: Play) -> bool:
    """A search, then the sum of a column of its hits."""
    operation = _operation(play)
    found = search(play, 2, 4)
    if operation is None or found is None or not _amounts(found[0], found[1]):
        return False
    domain, finder, searched = found
    column = play.rng.choice(_amounts(domain, finder))
    ask = asks.find(play, domain, finder, searched)
    hits = hits_of(play, finder, domain, searched)
    if any(g.column.name == column.name for g in searched) or any(column.name not in record for record in hits):
        return False
    contains = {finder.params[name].name for name in finder.action.contains if name in finder.params}  # type: ignore[union-attr]
    text = phrases.filters(play.rng, domain.plural, searched, contains, asks.kinds(domain, finder))
    _begin_sum(play, column, text if text.startswith("my ") else f"{play.rng.choice(('the', 'all'))} {text}")
    result = play.call(
        f"The user wants the sum of {column.label} of {ask.wish}. I call {finder.name}.", [(finder, ask.arguments)]
    )[0]
    if error_of(result) is not None:
        _give_up(play, domain, finder, result)
        return True
    _end_sum(play, operation, [record[column.name] for record in result], column)
    return True


def _begin_sum(play: Play, column: Column, names: str) -> None:
    question = play.rng.random() < 0.5
    body = phrases.one_of(play.rng, _SUM_QUESTIONS if question else _SUM_ORDERS, l=column.label, r=names)
    play.begin(phrases.request(play.rng, play.setting.tone, body, question=question))


def _end_sum(play: Play, operation: Operation, numbers: list[Any], column: Column) -> None:
    _end(
        play,
        operation,
        f"I add {len(numbers)} values of {column.name}. I call {operation.name}.",
        " + ".join(str(n) for n in numbers),
        "The sum is {v}.",
    )


def _give_up(play: Play, domain: Domain, operation: Operation, result: Any) -> None:
    error = error_of(result)
    assert error is not None
    play.finish(
        "It failed twice. I tell the user.",
        answers.failed(domain, None, error, error if busy(operation, result) else None),
    )
    play.gave_up = True
