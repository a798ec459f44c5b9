"""Compiled grammars as requests use them: where a text may continue and end, windows of drafts, the free part before
them, the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from agentspec.engine import bundled
from agentspec.errors import EngineClosedError, RequestError
from agentspec.runtime.constraint import Constraint
from agentspec.runtime.grammar import CompiledGrammar, GrammarCompiler
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import Grammar
from tests.fakes.grammar_walk import allowed_ids


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = new_compiler(tokenizer)
    yield compiler
    compiler.close()


def new_compiler(tokenizer: Tokenizer, **options: float) -> GrammarCompiler:
    """A compiler with 40 ids of padding in the output head, and both of the bundled model's stop ids."""
    stop_ids = [tokenizer.special_ids["<|im_end|>"], tokenizer.special_ids["<|endoftext|>"]]
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size + 40, stop_token_ids=stop_ids, **options)  # type: ignore[arg-type]


def allows(constraint: Constraint, token_id: int) -> bool:
    row = constraint.masks([])[0]
    return bool(int(row[token_id // 32]) >> token_id % 32 & 1)


def follow(tokenizer: Tokenizer, compiled: CompiledGrammar, text: str) -> Constraint | None:
    """The constraint after a text; None if the grammar doesn't admit it."""
    constraint = compiled.constraint()
    for token_id in tokenizer.encode(text):
        if not allows(constraint, token_id):
            return None
        constraint.advance([token_id])
    return constraint


def admits(tokenizer: Tokenizer, compiled: CompiledGrammar, text: str) -> bool:
    constraint = follow(tokenizer, compiled, text)
    return constraint is not None and allows(constraint, tokenizer.special_ids["<|im_end|>"])


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", r"\d{3}-\d{4}", ["555-1234"], ["555-123", "a555-1234", "555-12345", ""]),
        ("regex", r"^(yes|no)$", ["yes", "no"], ["", "yesno"]),
        ("ebnf", 'root ::= "a" b*\nb ::= "b" | "c"', ["a", "abcb"], ["", "b", "ad"]),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
            ['{"a": 1}', '{\n  "a": -12\n}'],
            ["{}", "[]"],
        ),
        ("json_schema", '{"enum": ["x", 1, null]}', ['"x"', "1", "null"], ["x", "2"]),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "sequence", "elements": ['
            '{"type": "any_text", "excludes": ["!"]}, '
            '{"type": "const_string", "value": "!"}, {"type": "grammar", "grammar": "root ::= [0-9]+"}]}}',
            ["!1", "so it is!42"],
            ["", "!", "!a", "1"],
        ),
    ],
)
def test_each_grammar_kind_admits_its_texts(
    tokenizer: Tokenizer, compiler: GrammarCompiler, kind: str, source: str, good: list[str], bad: list[str]
) -> None:
    compiled = compiler.compile(Grammar(kind=kind, source=source))  # type: ignore[arg-type]
    assert [text for text in good if not admits(tokenizer, compiled, text)] == []
    assert [text for text in bad if admits(tokenizer, compiled, text)] == []


def test_only_stop_ids_follow_a_complete_text(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = follow(tokenizer, compiler.compile(Grammar(kind="regex", source="yes")), "yes")
    assert constraint is not None
    stop_ids = {tokenizer.special_ids["<|im_end|>"], tokenizer.special_ids["<|endoftext|>"]}
    assert set(allowed_ids(constraint.masks([])[0], tokenizer.vocab_size + 40)) == stop_ids


def test_a_window_ends_with_a_stop_id_or_a_wrong_draft(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar(kind="regex", source="yes|yesterday")).constraint()
    stop_id, yes, other = tokenizer.special_ids["<|im_end|>"], tokenizer.encode("yes"), tokenizer.encode("#")
    rows = constraint.masks([*yes, stop_id, *other])
    assert len(rows) == len(yes) + 3
    assert stop_id in allowed_ids(rows[len(yes)], tokenizer.vocab_size)
    assert (rows[len(yes) + 1 :] == -1).all(), "rows after the end are never read"
    wrong = constraint.masks([*other, *yes])
    assert np.array_equal(wrong[0], rows[0]), "masks changed the constraint's position"
    assert (wrong[1:] == -1).all()
    constraint.advance([*yes, stop_id])


def test_padding_and_control_tokens_are_never_allowed(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Grammar(kind="ebnf", source="root ::= [^]*")).constraint()
    allowed = allowed_ids(constraint.masks([])[0], tokenizer.vocab_size + 40)
    assert max(allowed) < tokenizer.vocab_size
    assert tokenizer.special_ids["<|im_start|>"] not in allowed


def test_text_before_the_after_token_is_free_but_cannot_stop(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    think_end = tokenizer.id_of("</think>")
    assert think_end is not None
    compiled = compiler.compile(Grammar(kind="regex", source="yes", after=think_end, lead="\n\n"))
    stop_ids = [tokenizer.special_ids["<|im_end|>"], tokenizer.special_ids["<|endoftext|>"]]
    thought, (yes,), (gap,) = tokenizer.encode("hm, "), tokenizer.encode("yes"), tokenizer.encode("\n\n")
    constraint = compiled.constraint()
    for row in constraint.masks(thought):
        assert not set(stop_ids) & set(allowed_ids(row, tokenizer.vocab_size))
        assert len(allowed_ids(row, tokenizer.vocab_size)) == tokenizer.vocab_size - 2
    window = [*thought, think_end, gap, yes, stop_ids[0]]
    rows = constraint.masks(window)
    behind = {
        yes,
        gap,
        *(
            token
            for token, text in enumerate(tokenizer.token_bytes)
            if text and b"yes".startswith(text) | b"\n\nyes".startswith(text)
        ),
    }
    assert set(allowed_ids(rows[len(thought) + 1], tokenizer.vocab_size)) <= behind
    assert set(allowed_ids(rows[len(thought) + 2], tokenizer.vocab_size)) <= behind - {gap}
    assert set(allowed_ids(rows[len(thought) + 3], tokenizer.vocab_size)) == set(stop_ids)
    for token_id in window:
        one = constraint.masks([])
        assert np.array_equal(one[0], rows[0])
        rows = rows[1:]
        constraint.advance([token_id])


def test_constraints_of_one_grammar_are_independent(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar(kind="regex", source="ab+"))
    first, second = compiled.constraint(), compiled.constraint()
    before = second.masks([])
    first.advance(tokenizer.encode("ab"))
    assert np.array_equal(second.masks([]), before)
    assert not np.array_equal(first.masks([]), before)


def test_cached_grammar_needs_no_process(tokenizer: Tokenizer) -> None:
    compiler = new_compiler(tokenizer)
    grammar = Grammar(kind="regex", source="[a-f]+")
    handle = compiler.compile(grammar).handle
    compiler.close()
    assert compiler.compile(grammar).handle is handle
    with pytest.raises(EngineClosedError):
        compiler.compile(Grammar(kind="regex", source="[a-e]+"))


def test_known_returns_only_cached_grammars(tokenizer: Tokenizer) -> None:
    compiler = new_compiler(tokenizer)
    asked = Grammar(kind="regex", source="[a-f]+")
    assert compiler.known(asked) is None
    compiler.compile(asked)
    found = compiler.known(asked)
    assert found is not None
    assert admits(tokenizer, found, "abc")
    assert compiler.known(Grammar(kind="regex", source="[a-g]+")) is None
    assert compiler.known(Grammar(kind="regex", source="[a-f]+", after=10**6)) is None, (
        "compile refuses it with a reason"
    )
    compiler.close()


def test_cache_evicts_the_least_recently_used(tokenizer: Tokenizer) -> None:
    compiler = new_compiler(tokenizer, cache_bytes=1)
    first, second = Grammar(kind="regex", source="a+"), Grammar(kind="regex", source="b+")
    compiler.compile(first)
    compiler.compile(second)
    compiler.close()
    compiler.compile(second)
    with pytest.raises(EngineClosedError):
        compiler.compile(first)


@pytest.mark.parametrize(
    ("grammar", "field", "reason"),
    [
        (Grammar(kind="regex", source="a(?=b)"), "grammar.source", "group"),
        (Grammar(kind="ebnf", source="root := "), "grammar.source", "can't be compiled"),
        (Grammar(kind="ebnf", source='root ::= "\ud800"'), "grammar.source", "Unicode"),
        (Grammar(kind="json_schema", source="{"), "grammar.source", "not JSON"),
        (Grammar(kind="json_schema", source="[" * 100_000), "grammar.source", "not JSON"),
        (Grammar(kind="json_schema", source='{"not": {}}'), "grammar.source.not", "not supported"),
        (Grammar(kind="structural_tag", source="{}"), "grammar.source", "can't be compiled"),
        (
            Grammar(
                kind="structural_tag",
                source=json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}),
            ),
            "grammar.source",
            "json_schema",
        ),
        (Grammar(kind="regex", source="a", after=-1), "grammar.after", "token id"),
        (Grammar(kind="ebnf", source="#" * 2_000_000), "grammar.source", "longer"),
    ],
)
def test_refusals_name_field_and_reason(compiler: GrammarCompiler, grammar: Grammar, field: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.compile(grammar)
    assert caught.value.field == field
