"""Boundaries of reasoning, content and calls: a table of cases, and equal events for any chunking."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from agentspec.text.events import ContentDelta, ReasoningDelta, TextEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from agentspec.text.segmenter import Segmenter
from agentspec.text.tool_calls import DIALECTS, ToolSchemas, detect_dialect
from tests.text.conversations import TOOLS

SCHEMAS = ToolSchemas(TOOLS)


def call_text(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def segmenter(
    reasoning_open: bool = False,
    dialect: str | None = "qwen3_coder",
    tools: ToolSchemas | None = SCHEMAS,
    places: dict[str, set[int]] | None = None,
) -> Segmenter:
    numbers = itertools.count()
    return Segmenter(
        reasoning_open=reasoning_open,
        dialect=DIALECTS[dialect] if dialect else None,
        tools=tools,
        new_call_id=lambda: f"id{next(numbers)}",
        places=places,
    )


def merged(events: Sequence[TextEvent]) -> list[TextEvent]:
    result: list[TextEvent] = []
    for event in events:
        last = result[-1] if result else None
        match (last, event):
            case (ReasoningDelta(a), ReasoningDelta(b)):
                result[-1] = ReasoningDelta(a + b)
            case (ContentDelta(a), ContentDelta(b)):
                result[-1] = ContentDelta(a + b)
            case (ToolCallArguments(i, a), ToolCallArguments(j, b)) if i == j:
                result[-1] = ToolCallArguments(i, a + b)
            case _:
                result.append(event)
    return result


def events_of(chunks: Sequence[str], *, is_cut: bool = False, **options: Any) -> list[TextEvent]:
    splitter = segmenter(**options)
    events = [event for chunk in chunks for event in splitter.push(chunk)]
    return merged([*events, *splitter.finish(is_cut=is_cut)])


def shown(events: Sequence[TextEvent]) -> list[str]:
    """Return one short line per event: R text, C text, or the call with its arguments; `...` for a call without an
    end."""
    lines: list[str] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                lines.append(f"R {text}")
            case ContentDelta(text):
                lines.append(f"C {text}")
            case ToolCallStart(index, call_id, name):
                lines.append(f"{index} {call_id} {name}(...")
            case ToolCallArguments(_, text):
                lines[-1] = lines[-1].removesuffix("...") + text + "..."
            case ToolCallEnd():
                lines[-1] = lines[-1].removesuffix("...") + ")"
    return lines


SEARCH = call_text("search_flights", to="Oslo")
SEARCHED = 'search_flights({"to": "Oslo"})'

TABLE: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "plain text stays as it is": ({}, "  Hello \n\nthere\n", ["C   Hello \n\nthere\n"]),
    "reasoning and content": ({"reasoning_open": True}, "so\n</think>\n\nHello\n", ["R so", "C Hello\n"]),
    "reasoning alone": ({"reasoning_open": True}, "so on\n", ["R so on\n"]),
    "empty reasoning": ({"reasoning_open": True}, "\n</think>\n\nHello", ["C Hello"]),
    "think opened by the model": ({}, "\n<think>\nso\n</think>\n\nHello", ["R so", "C Hello"]),
    "think inside reasoning": ({"reasoning_open": True}, "<think>\na<think>b</think>c", ["R ab", "C c"]),
    "think inside content is text": ({}, "the <think> tag", ["C the <think> tag"]),
    "duplicate close": ({"reasoning_open": True}, "a</think>\n</think>\n\nb</think>c", ["R a", "C bc"]),
    "stray close at the beginning": ({}, "\n</think>\n\nb", ["C b"]),
    "call after content": ({}, f"Looking.\n\n{SEARCH}", ["C Looking.", f"0 id0 {SEARCHED}"]),
    "call after reasoning": ({"reasoning_open": True}, f"so\n</think>\n\n{SEARCH}\n", ["R so", f"0 id0 {SEARCHED}"]),
    "call ends reasoning": ({"reasoning_open": True}, f"so\n{SEARCH}", ["R so", f"0 id0 {SEARCHED}"]),
    "close behind a call that ended reasoning": (
        {"reasoning_open": True},
        f"so\n{SEARCH}\n</think>\n\nx",
        ["R so", f"0 id0 {SEARCHED}", "C x"],
    ),
    "two calls": ({}, f"{SEARCH}\n{SEARCH}\nand?", [f"0 id0 {SEARCHED}", f"1 id1 {SEARCHED}", "C and?"]),
    "no call without tools": ({"tools": None}, f"a {SEARCH}", [f"C a {SEARCH}"]),
    "no call without a dialect": ({"dialect": None}, f"a {SEARCH}", [f"C a {SEARCH}"]),
    "trigger without a call": ({}, "a <tool_call>\nb </tool_call> c", ["C a <tool_call>\nb </tool_call> c"]),
    "trigger without a call in reasoning": (
        {"reasoning_open": True},
        "say <tool_call> now\n</think>\n\nc",
        ["R say <tool_call> now", "C c"],
    ),
    "call right behind a mere trigger": ({}, f"<tool_call> {SEARCH}", ["C <tool_call>", f"0 id0 {SEARCHED}"]),
    "bare function of a tool": ({}, f"ok\n{SEARCH[12:]}", ["C ok", f"0 id0 {SEARCHED}"]),
    "bare function of no tool": ({}, "a <function=other>\n</function>", ["C a <function=other>\n</function>"]),
    "unknown name is a call": ({}, call_text("other", x="1"), ['0 id0 other({"x": "1"})']),
    "no arguments": ({}, call_text("f"), ["0 id0 f({})"]),
    "hermes": (
        {"dialect": "hermes"},
        'a\n<tool_call>\n{"name": "f", "arguments": {"b": [1]}}\n</tool_call>\n',
        ["C a", '0 id0 f({"b": [1]})'],
    ),
    "hermes, not JSON": ({"dialect": "hermes"}, "a <tool_call>{b}</tool_call> c", ["C a <tool_call>{b}</tool_call> c"]),
}


@pytest.mark.parametrize("name", TABLE)
def test_segmentation_table(name: str) -> None:
    options, text, expected = TABLE[name]
    assert shown(events_of([text], **options)) == expected
    assert shown(events_of(list(text), **options)) == expected


CUT: dict[str, tuple[str, list[str]]] = {
    "inside a value": ("a\n\n<tool_call>\n<function=f>\n<parameter=x>\none\ntw", ["C a", '0 id0 f({"x": "one\\ntw...']),
    "inside a typed value": (
        "<tool_call>\n<function=search_flights>\n<parameter=seats>\n1",
        ['0 id0 search_flights({"seats": 1...'],
    ),
    "between": ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<para", ['0 id0 f({"x": "1...']),
    "before the end of the call": ("<tool_call>\n<function=f>\n</function>\n</tool", ["0 id0 f(..."]),
    "inside the head": ("a <tool_call>\n<func", ["C a <tool_call>\n<func"]),
}


@pytest.mark.parametrize("name", CUT)
def test_truncated_call_has_no_end_event(name: str) -> None:
    text, expected = CUT[name]
    for chunks in ([text], list(text)):
        splitter = segmenter()
        events = [event for chunk in chunks for event in splitter.push(chunk)] + splitter.finish(is_cut=True)
        assert shown(merged(events)) == expected
        assert splitter.turn.is_call_cut
        assert splitter.turn.calls == ()
        assert [call.name for call in splitter.turn.shown_calls] == [
            event.name for event in events if isinstance(event, ToolCallStart)
        ]


def test_truncated_hermes_call_is_content() -> None:
    text = 'a\n<tool_call>\n{"name": "f", "argu'
    assert shown(events_of(list(text), dialect="hermes", is_cut=True)) == [f"C {text}"]


def test_turn_collects_all_segments() -> None:
    splitter = segmenter(reasoning_open=True)
    splitter.push(f"so\n</think>\n\nLooking.\n\n{call_text('search_flights', seats='2', direct='True')}\n{SEARCH}")
    splitter.finish()
    turn = splitter.turn
    assert (turn.reasoning, turn.content, turn.is_call_cut) == ("so", "Looking.", False)
    assert [(made.id, made.name, json.loads(made.arguments)) for made in turn.calls] == [
        ("id0", "search_flights", {"seats": 2, "direct": True}),
        ("id1", "search_flights", {"to": "Oslo"}),
    ]
    assert turn.calls[0].as_written == {"seats": "2", "direct": "True"}


SCRAPS = (
    "a",
    " ",
    "\n",
    "\n\n",
    "<",
    "</",
    "é",
    '"',
    "\\",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=search_flights>",
    "<function=write_file>",
    "<function=other>",
    "<function=",
    "</function>",
    "<parameter=to>",
    "<parameter=seats>",
    "<parameter=",
    "</parameter>",
    "2",
    "true",
    SEARCH,
    call_text("write_file", path="x\n</parameter>\ny"),
    '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>\\""}}\n</tool_call>',
    '{"name": "f", "arguments": {}}',
)


@pytest.mark.parametrize("dialect", ["qwen3_coder", "hermes"])
def test_events_are_independent_of_chunking(dialect: str) -> None:
    rng = random.Random(4)
    for trial in range(3000):
        text = "".join(rng.choice(SCRAPS) for _ in range(rng.randrange(1, 16)))
        options: dict[str, Any] = {
            "reasoning_open": rng.random() < 0.5,
            "dialect": dialect,
            "is_cut": rng.random() < 0.3,
        }
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
        chunks = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        expected = events_of([text], **options)
        message = f"seed 4, trial {trial}: {text!r}"
        assert events_of(chunks, **options) == expected, message
        assert events_of(list(text), **options) == expected, message
        check_order(expected, is_cut=options["is_cut"], message=message)


def test_content_offsets_and_reasoning_end() -> None:
    rng = random.Random(6)
    for trial in range(1000):
        text = "".join(rng.choice(SCRAPS) for _ in range(rng.randrange(1, 16)))
        options: dict[str, Any] = {"reasoning_open": rng.random() < 0.5}
        is_cut, size = rng.random() < 0.3, rng.randrange(1, 9)
        ends = set()
        for chunks in ([text], [text[start : start + size] for start in range(0, len(text), size)]):
            splitter = segmenter(**options)
            events = [event for chunk in chunks for event in splitter.push(chunk)] + splitter.finish(is_cut=is_cut)
            message = f"seed 6, trial {trial}: {text!r}"
            for event in events:
                if isinstance(event, ContentDelta):
                    shown_text, end = event.text.lstrip(), event.at + len(event.text)
                    assert text[:end].endswith(shown_text), message
                    assert event.at >= splitter.reasoning_end or not shown_text, message
            ends.add(splitter.reasoning_end)
        assert len(ends) == 1, message


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("so\n</think>\n\nHello", "so\n</think>"),
        ("so on\n", "so on\n"),
        (f"so\n{SEARCH}", "so\n"),
        (f"so\n{SEARCH[:50]}", "so\n"),
        ("so <tool_call>", "so <tool_call>"),
    ],
)
def test_the_end_of_reasoning(text: str, reasoning: str) -> None:
    splitter = segmenter(reasoning_open=True)
    splitter.push(text)
    splitter.finish(is_cut=True)
    assert splitter.reasoning_end == len(reasoning)


def check_order(events: Sequence[TextEvent], *, is_cut: bool, message: str) -> None:
    """Check that calls are numbered in order, start and end once and have JSON arguments, and that reasoning comes
    first."""
    arguments: dict[int, str] = {}
    ended: list[int] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(arguments), message
            arguments[event.index] = ""
        elif isinstance(event, ToolCallArguments):
            assert event.index not in ended, message
            arguments[event.index] += event.text
        elif isinstance(event, ToolCallEnd):
            assert isinstance(json.loads(arguments[event.index]), dict), message
            ended.append(event.index)
        elif isinstance(event, ReasoningDelta):
            assert not arguments, message
        assert not (isinstance(event, ReasoningDelta | ContentDelta) and not event.text), message
    assert len(arguments) - len(ended) in ((0, 1) if is_cut else (0,)), message


def test_text_without_tags_is_unchanged() -> None:
    """Text without reasoning tags and calls is passed on unchanged."""
    rng = random.Random(5)
    scraps = [
        scrap
        for scrap in SCRAPS
        if scrap not in ("<think>", "</think>", "<function=search_flights>", "<function=write_file>")
        and "=other>" not in scrap
    ]
    scraps = [scrap for scrap in scraps if scrap != SEARCH and "write_file" not in scrap]
    for trial in range(2000):
        text = "".join(rng.choice(scraps) for _ in range(rng.randrange(1, 16)))
        events = events_of(list(text))
        if all(isinstance(event, ContentDelta) for event in events):
            assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == text, (
                f"seed 5, trial {trial}: {text!r}"
            )


def test_detected_dialects() -> None:
    assert detect_dialect("... <tool_call>\n<function=name>") == "qwen3_coder"
    assert detect_dialect('... <tool_call>{"name"') == "hermes"
    assert detect_dialect("{{ messages }}") is None


def tokens_of(text: str) -> dict[str, set[int]]:
    """Return tag -> offsets, except tags after a backslash, which are quoted."""
    tags = ("<think>", "</think>", "<tool_call>")
    return {tag: {found.start() for found in re.finditer(rf"(?<!\\){tag}", text)} for tag in tags}


QUOTED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "a call": ({}, f"It says \\{SEARCH} there.", [f"C It says \\{SEARCH} there."]),
    "a bare call": ({}, SEARCH[12:], [f"C {SEARCH[12:]}"]),
    "a call in reasoning": ({"reasoning_open": True}, f"say \\{SEARCH}.\n</think>\n\nc", [f"R say \\{SEARCH}.", "C c"]),
    "the end of reasoning": (
        {"reasoning_open": True},
        "say \\</think> or \\<think>.</think>c",
        ["R say \\</think> or \\<think>.", "C c"],
    ),
    "the beginning of reasoning": ({}, "\\<think>a</think>b", ["C \\<think>ab"]),
    "the end of reasoning in content": ({}, "a\\</think>b", ["C a\\</think>b"]),
    "and a real call": ({}, f"\\<tool_call>\n{SEARCH}", ["C \\<tool_call>", f"0 id0 {SEARCHED}"]),
    "in a call": ({}, f"{call_text('f', x='a' + chr(92) + '<tool_call>')}", ['0 id0 f({"x": "a\\\\<tool_call>"})']),
}


@pytest.mark.parametrize("name", QUOTED)
def test_token_tags_are_recognised_at_their_places_only(name: str) -> None:
    options, text, expected = QUOTED[name]
    for chunks in ([text], list(text)):
        assert shown(events_of(chunks, places=tokens_of(text), **options)) == expected


def test_all_tags_as_tokens_equals_text_mode() -> None:
    rng = random.Random(7)
    scraps = [scrap for scrap in SCRAPS if not scrap.startswith(("<function=", "\\"))]
    for trial in range(1000):
        text = "".join(rng.choice(scraps) for _ in range(rng.randrange(1, 16)))
        options: dict[str, Any] = {"reasoning_open": rng.random() < 0.5, "is_cut": rng.random() < 0.3}
        assert events_of(list(text), places=tokens_of(text), **options) == events_of([text], **options), (
            f"seed 7, trial {trial}: {text!r}"
        )
