"""Constraints that a client may put on the form of an answer, and the grammar of one turn that enforces them.

Builds grammar descriptions only (wire.Grammar); the runtime compiles them. Tags are matched as text, as the segmenter
reads them: a grammar over token ids could be bypassed by spelling a tag in other tokens. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from agentspec.errors import RequestError
from agentspec.text.automata import TooLargeError, add_automaton
from agentspec.text.call_grammar import call_body
from agentspec.text.chat_template import Tools
from agentspec.text.grammar_rules import Rules, any_of, free_text, literal
from agentspec.text.json_schema import SchemaReader, check_size
from agentspec.text.schema_grammar import PRETTY, SchemaGrammar
from agentspec.text.schema_patterns import ANY_TEXT, PatternError, read_pattern
from agentspec.text.segmenter import THINK_CLOSE
from agentspec.text.tool_calls import DIALECTS, Dialect, ToolSchemas
from agentspec.text.tool_calls.protocol import CALL_OPEN
from agentspec.wire import Grammar

MAX_CHOICES = 1000
_CACHED_GRAMMARS = 32
_LEAD = '"\\n"{0,2}'
"""The newlines that templates write after reasoning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForm:
    """The form that the content must have.

    `source`: a JSON schema (json_schema), None (json_object), the expression (regex), the grammar (ebnf), or the list
    of texts (choice). `field` names it in errors."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
    source: Any
    field: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolDemand:
    """The tool calls that a turn may or must make."""

    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The only tool that may be called; `choice` is then "required"."""
    parallel: bool = True
    """Whether the turn may make more than one call."""


def is_constrained(tools: Tools | None, demand: ToolDemand, output: OutputForm | None) -> bool:
    """Whether anything constrains the turn. If not, its grammar is None."""
    if output is not None:
        return True
    return demand.choice == "required" or (
        demand.choice == "auto" and (not demand.parallel or any(_is_strict(tool) for tool in tools or ()))
    )


def turn_grammar(
    tools: Tools | None, demand: ToolDemand, output: OutputForm | None, *, dialect: Dialect | None, reasoning_open: bool
) -> Grammar | None:
    """Build the grammar of one turn; None when nothing constrains it.

    `reasoning_open`: the turn begins inside reasoning, which is free text up to its end tag or to a call. `output`
    constrains the content only; a turn with calls then has no content, and the segmenter must be told (`has_form`).
    Takes up to a few hundred milliseconds for many tools; recent results are cached. Raises RequestError naming the
    field that can't be enforced."""
    if not is_constrained(tools, demand, output):
        return None
    form = None if output is None else (output.kind, output.source, output.field)
    if output is not None and output.kind in ("regex", "ebnf") and not isinstance(output.source, str):
        raise RequestError(output.field, output.source, "must be a text")
    try:
        asked = json.dumps([tools, demand.choice, demand.name, demand.parallel, form])
    except RecursionError:
        raise RequestError("tools" if output is None else output.field, "...", "nests too deep") from None
    return _turn_grammar(asked, None if dialect is None else dialect.name, reasoning_open)


@lru_cache(maxsize=_CACHED_GRAMMARS)
def _turn_grammar(asked: str, dialect: str | None, reasoning_open: bool) -> Grammar | None:
    """Build a grammar from its arguments as JSON text, the cache key, so that the turns of a conversation share it."""
    tools, choice, name, parallel, form = json.loads(asked)
    output = None if form is None else OutputForm(kind=form[0], source=form[1], field=form[2])
    calls = _calls(
        tools, ToolDemand(choice=choice, name=name, parallel=parallel), None if dialect is None else DIALECTS[dialect]
    )
    if calls is None:
        return None if output is None else _form_alone(output, reasoning_open)
    if choice == "required":
        content = calls.some
    elif output is not None:
        content = any_of([_form(output, calls.rules), calls.some])
    else:
        content = calls.among_text
    inside = calls.then_text if choice == "auto" and output is None else calls.some
    root = _behind_reasoning(calls.rules, content, calls=inside) if reasoning_open else content
    return Grammar(kind="ebnf", source=calls.rules.source(root), field="tools" if output is None else output.field)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool.get("function", tool).get("strict") is True


@dataclass(frozen=True, slots=True)
class _Calls:
    """Expressions for the calls of a turn."""

    rules: Rules
    some: str
    """One or more calls and nothing else."""
    among_text: str
    """Free text with any number of calls in it."""
    then_text: str
    """A call, then free text with further calls."""


def _calls(tools: Tools | None, demand: ToolDemand, dialect: Dialect | None) -> _Calls | None:
    """Return None when the turn can't make calls, or when the model's call dialect is unknown."""
    if demand.choice == "none" or (not tools and demand.choice == "auto"):
        return None
    if not tools:
        raise RequestError("tool_choice", demand.name or demand.choice, "needs tools to choose from")
    names = [tool.get("function", tool)["name"] for tool in tools]
    if demand.name is not None and demand.name not in names:
        raise RequestError("tool_choice", demand.name, "is not one of the tools")
    is_strict = [_is_strict(tool) for tool in tools]
    is_demanded = demand.choice == "required"
    if dialect is None:
        if is_demanded or any(is_strict):
            raise RequestError(
                "tools",
                names,
                "can't be enforced: this model's chat template teaches no form of calls that is known here",
            )
        return None
    rules = Rules("tools")
    bodies = []
    for index, tool in enumerate(tools):
        if names[index] in names[:index]:
            raise RequestError(f"tools[{index}].function.name", names[index], "is the name of an earlier tool, too")
        if demand.name in (None, names[index]):
            bodies.append(
                _body(dialect, rules, tool, f"tools[{index}]", is_strict=is_strict[index], is_demanded=is_demanded)
            )
    call = rules.add(f"{literal(CALL_OPEN)} {any_of(bodies)}")
    text = rules.add(free_text(_triggers(dialect, tools)))
    return _Calls(
        rules,
        some=rules.add(f'{call} ("\\n" {call})*') if demand.parallel else call,
        among_text=rules.add(f"{text} ({call} {text})*" if demand.parallel else f"{text} {call}?"),
        then_text=rules.add(f"{call} {text} ({call} {text})*") if demand.parallel else call,
    )


def _triggers(dialect: Dialect, tools: Tools) -> list[str]:
    """Return the texts that free text must not contain: the beginnings of calls, without tool names to keep the grammar
    small."""
    return list(
        dict.fromkeys(
            trigger.partition("=")[0] + trigger.partition("=")[1] for trigger in dialect.triggers(ToolSchemas(tools))
        )
    )


def _body(
    dialect: Dialect, rules: Rules, tool: Mapping[str, Any], path: str, *, is_strict: bool, is_demanded: bool
) -> str:
    """Return the body of a call. A strict tool is always bound to its schema; a required call of another tool is bound
    only where its schema can be enforced, since the API does not promise it."""
    if is_strict or is_demanded:
        try:
            return call_body(dialect.name, rules, tool, path, is_bound=True)
        except RequestError:
            if is_strict:
                raise
    return call_body(dialect.name, rules, tool, path, is_bound=False)


def _form(output: OutputForm, rules: Rules) -> str:
    """Return an expression for content of this form."""
    match output.kind:
        case "json_schema" | "json_object":
            schema = output.source if output.kind == "json_schema" else {"type": "object", "additionalProperties": True}
            return SchemaGrammar(rules, SchemaReader(schema, output.field), PRETTY).value(schema, output.field)
        case "choice":
            return rules.add(" | ".join(map(literal, _choices(output))))
        case "regex":
            try:
                return add_automaton(rules, read_pattern(output.source, ANY_TEXT, is_whole=True))
            except (PatternError, TooLargeError) as error:
                raise RequestError(output.field, output.source, str(error)) from None
        case "ebnf":
            raise RequestError(
                output.field, output.source, "can't go together with tools that the turn may call: use tool_choice none"
            )


def _form_alone(output: OutputForm, reasoning_open: bool) -> Grammar:
    if output.kind == "ebnf":
        if not reasoning_open:
            return Grammar(kind="ebnf", source=output.source, field=output.field)
        return Grammar(kind="structural_tag", source=_ebnf_behind_reasoning(output.source), field=output.field)
    rules = Rules(output.field)
    content = _form(output, rules)
    return Grammar(
        kind="ebnf",
        source=rules.source(_behind_reasoning(rules, content) if reasoning_open else content),
        field=output.field,
    )


def _choices(output: OutputForm) -> list[str]:
    texts = output.source
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(output.field, texts, "must be a list of texts, none of them empty")
    if len(texts) > MAX_CHOICES:
        raise RequestError(output.field, texts[:3], f"has {len(texts)} texts; {MAX_CHOICES} are the limit")
    check_size(texts, output.field)
    return texts


def _behind_reasoning(rules: Rules, content: str, *, calls: str | None = None) -> str:
    """Return an expression for reasoning up to its end tag, then the content; or for calls that end the reasoning."""
    ends = [THINK_CLOSE] if calls is None else [THINK_CLOSE, CALL_OPEN]
    reasoning = rules.add(free_text(ends))
    answer = f"{literal(THINK_CLOSE)} {_LEAD} {content}"
    return f"{reasoning} ({answer} | {calls})" if calls is not None else f"{reasoning} {answer}"


def _ebnf_behind_reasoning(source: str) -> str:
    """Return a structural tag, in which the client's grammar keeps its own rule names."""
    lead = f"root ::= {_LEAD}"
    elements = [
        {"type": "any_text", "excludes": [THINK_CLOSE]},
        {"type": "const_string", "value": THINK_CLOSE},
        *({"type": "grammar", "grammar": text} for text in (lead, source)),
    ]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
