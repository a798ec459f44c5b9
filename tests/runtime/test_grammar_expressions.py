"""The EBNF expressions that grammars are built of, compiled and compared with Python's own matching: character by
character, over small alphabets. xgrammar misreads some shapes of expressions (it joins states too freely), so every
shape in use is tested here."""

from __future__ import annotations

import random
import re
from decimal import Decimal

import pytest

from agentspec.runtime.grammar.backend import Backend, Matcher
from agentspec.runtime.grammar.frames import CompileJob, Vocabulary
from agentspec.text.automata import add_automaton
from agentspec.text.call_grammar import BARRED_IN_XML
from agentspec.text.grammar_rules import Rules, regex, text_without
from agentspec.text.number_patterns import ANY_INTEGER, ANY_NUMBER, integers_between, numbers_between
from agentspec.text.schema_grammar import json_character
from agentspec.text.schema_patterns import ANY_TEXT, FORMATS, JSON_STRING, all_but, none_of, read_pattern

STOP = 256
BACKEND = Backend(
    Vocabulary(
        token_bytes=[bytes([byte]) for byte in range(256)] + [b""],
        vocab_size=257,
        stop_token_ids=[STOP],
        job_seconds=60,
    )
)


def compiled(source: str) -> Matcher:
    return BACKEND.matcher(BACKEND.compile(CompileJob(kind="ebnf", source=source)))


def automaton(pattern: str, *, is_whole: bool = True) -> Matcher:
    rules = Rules("pattern")
    return compiled(rules.source(add_automaton(rules, read_pattern(pattern, ANY_TEXT, is_whole=is_whole))))


def admitted(matcher: Matcher, texts: list[str]) -> list[str]:
    """The texts that a matcher admits from its beginning."""
    found = []
    for text in texts:
        num_accepted = 0
        for byte in text.encode():
            if not matcher.accept(byte):
                break
            num_accepted += 1
        if num_accepted == len(text.encode()) and matcher.accept(STOP):
            found.append(text)
            num_accepted += 1
        matcher.roll_back(num_accepted)
    return found


def texts_over(alphabet: list[str], longest: int) -> list[str]:
    found = [""]
    for text in found:
        if len(found) > 20_000 or text.count("\0") == longest:
            break
        found += [f"{text}{letter}\0" for letter in alphabet]
    return sorted({text.replace("\0", "") for text in found})


def python_pattern(expression: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\u\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), expression))


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(("a", "b", "[ab]", "[bc]", "c", "[^a]"))
    if kind < 0.55:
        return "".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.8:
        return "(" + "|".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))) + ")"
    return f"({random_pattern(rng, depth - 1)})" + rng.choice(("?", "*", "+", "{2}", "{1,2}", "{0,2}", "{1,}"))


def test_automata_match_their_patterns() -> None:
    texts = texts_over(["a", "b", "c"], 4)
    for seed in range(300):
        pattern = random_pattern(random.Random(seed), 3)
        assert admitted(automaton(pattern), texts) == [text for text in texts if re.fullmatch(pattern, text)], (
            f"seed {seed}: {pattern}"
        )


@pytest.mark.parametrize(
    "pattern",
    ["b", "^a", "a$", "^a|b$", r"\w+", r"^\W+$", r"^[^\w]$", r"^\S+$", r"^.$", r"^[\d.-]+$", r"\x61\u0062", "^a+?b??$"],
)
def test_schema_patterns_admit_only_what_validators_accept(pattern: str) -> None:
    texts = texts_over(["a", "b", "A", "1", "-", " ", "\n", "é", "٣", "\u2003"], 3)
    found = admitted(automaton(pattern, is_whole=False), texts)
    assert found
    assert [text for text in found if not re.search(pattern, text)] == []
    plain = [text for text in texts if text.isascii() and "\n" not in text and re.search(pattern, text)]
    assert sorted(set(plain) - set(found)) == []


@pytest.mark.parametrize(
    ("expression", "alphabet"),
    [
        (text_without(BARRED_IN_XML, all_but), ["<", "/", "p", "a", "r", "x"]),
        (text_without(BARRED_IN_XML, all_but), ["<", "/", "fu", "n", "to", "o"]),
        (all_but("<") * 2 + text_without(BARRED_IN_XML, all_but), ["<", "/", "pa", "r", "x"]),
        (text_without(BARRED_IN_XML, json_character), ["<", "/", "pa", "r", "\\", '"', "n"]),
        (text_without(BARRED_IN_XML, json_character) + '"', ["<", "/", "pa", "r", "\\", '"']),
        (json_character("") + "*", ["<", "\\", '"', "u", "n", "d8", "00", "ü"]),
        (json_character("") + '*"', ["\\", '"', "u", "n", "d7", "00", "a"]),
        (json_character("") * 3 + json_character("") + "*", ["a", "\\", '"', "n", "u", "00"]),
    ],
)
def test_loops_over_characters(expression: str, alphabet: list[str]) -> None:
    texts = texts_over(alphabet, 6)
    pattern = python_pattern(expression)
    assert admitted(compiled(f"root ::= {regex(expression)}"), texts) == [
        text for text in texts if pattern.fullmatch(text)
    ]


def test_names_that_exclude_given_words() -> None:
    texts = texts_over(["c", "i", "t", "y", "a", "b", "größe", '"', "\\"], 4)
    for words in (["city", "ci", "a"], ["a", "ab", "", "größe"], ['c"i', "cit"]):
        rules = Rules("names")
        found = admitted(compiled(rules.source(add_automaton(rules, none_of(words, JSON_STRING)))), texts)
        assert found == [text for text in texts if text not in words and not set(text) & {'"', "\\"}]


def test_no_expression_admits_invalid_utf8() -> None:
    heads = [
        bytes([0xC0, 0x80]),
        bytes([0xE0, 0x80, 0x80]),
        bytes([0xED, 0xA0, 0x80]),
        bytes([0xF0, 0x80, 0x80, 0x80]),
        bytes([0xF4, 0x90, 0x80, 0x80]),
    ]
    for matcher in (
        compiled(f"root ::= {regex(all_but('<') + '*')}"),
        automaton("[^<]*"),
        compiled(f"root ::= {regex(json_character('') + '*')}"),
    ):
        for head in heads:
            num_accepted = next((index for index, byte in enumerate(head) if not matcher.accept(byte)), len(head))
            assert num_accepted < len(head), head
            matcher.roll_back(num_accepted)


@pytest.mark.parametrize("seed", range(4))
def test_ranges_of_numbers(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        low = rng.randint(-(10 ** rng.randint(0, 5)), 10 ** rng.randint(0, 5))
        high = low + rng.randint(0, 10 ** rng.randint(0, 5))
        numbers = sorted(
            {low, high, low - 1, high + 1, 0, -low, low * 10, high * 10, (low + high) // 2, rng.randint(low, high)}
        )
        found = admitted(automaton(integers_between(low, high)), [str(number) for number in numbers])
        assert found == [str(number) for number in numbers if low <= number <= high], f"seed {seed}: {low} to {high}"
    for _ in range(25):
        first, last = sorted(Decimal(rng.randint(-(10**5), 10**5)).scaleb(-rng.randint(0, 4)) for _ in range(2))
        above, below = rng.random() < 0.3, rng.random() < 0.3
        expression = numbers_between(first, last + 1, above_low=above, below_high=below)
        assert expression is not None
        middle = (first + last) / 2
        some = {
            first,
            last + 1,
            first - 1,
            last + 2,
            middle,
            first + Decimal("0.01"),
            last + Decimal("0.99"),
            Decimal(0),
            Decimal(int(middle)),
        }
        for text in admitted(automaton(expression), [f"{number:f}" for number in some]):
            assert first < Decimal(text) if above else first <= Decimal(text), f"seed {seed}"
            assert Decimal(text) < last + 1 if below else Decimal(text) <= last + 1, f"seed {seed}"
        assert admitted(automaton(expression), [f"{first + Decimal('0.5'):f}"]), (
            f"seed {seed}: nothing within {first} and {last + 1}"
        )


def test_numbers_are_json() -> None:
    texts = texts_over(["0", "1", "-", ".", "e", "+"], 5)
    assert admitted(automaton(ANY_INTEGER), texts) == [text for text in texts if re.fullmatch(r"0|-?[1-9]\d*", text)]
    assert admitted(automaton(ANY_NUMBER), texts) == [
        text for text in texts if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d{1,2})?", text)
    ]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "2100-02-29", "2024-04-31", "2024-00-10"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2024-02-29 12:00:00Z", "2024-02-29"]),
        ("duration", ["P1D", "PT5M", "P2W", "P1Y2M3DT4H"], ["P", "PT", "5M", "P1H"]),
        ("email", ["a.b@c.org"], ["a@b", "@c.org", "a..b@c.org"]),
        ("hostname", ["a", "a-b.c"], ["-a", "a..b"]),
        ("ipv4", ["0.0.0.0", "255.10.1.99"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
        ("ipv6", ["0:0:0:0:0:0:0:1"], ["0:0:0:0:0:0:1"]),
        ("uri", ["https://a.b/c?d=e#f"], ["a.b/c", "https://"]),
        ("uuid", ["01234567-89ab-cdef-0123-456789abcdef"], ["01234567-89ab-cdef-0123-456789abcde"]),
    ],
)
def test_formats(name: str, good: list[str], bad: list[str]) -> None:
    assert admitted(automaton(FORMATS[name], is_whole=False), good + bad) == good
