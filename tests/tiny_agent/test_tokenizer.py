"""The tokenizer: its size, its added tokens, context-independent words, and the same ids in every loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentspec.text.chat_template import ChatTemplate
from agentspec.text.tokenizer import Tokenizer
from scripts.tiny_agent import tokenizer as tiny
from scripts.tiny_agent.render import conversation_text
from tests.tiny_agent.examples import EXAMPLES, small_tokenizer

TEXTS = [conversation_text(example, len(example.turns)) for example in EXAMPLES]
PLACES = [
    "{}",
    " {}",
    '"{}"',
    "_{}",
    "\n{}\n",
    "[{}]",
    "\u2013{}",
    "7{}7",
    "<parameter={}>",
    "get_{}_id",
    "due{}",
    "({}).\n\n",
    "ends.\\n{}\\n\\n- ",
]


@pytest.mark.parametrize("word", ["Order", "Zoë", "Zwrok", "Naïve"])
def test_a_word_has_the_same_tokens_everywhere(word: str) -> None:
    tokenizer = small_tokenizer()
    alone = tokenizer.encode(word).ids
    for place in PLACES:
        before, after = place.split("{}")
        expected = tokenizer.encode(before).ids + alone + tokenizer.encode(after).ids
        assert tokenizer.encode(place.format(word)).ids == expected, place


def test_every_loader_gives_the_same_ids(tmp_path: Path) -> None:
    tiny.write(small_tokenizer(), tmp_path)
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    # e + combining acute is normalised to one letter; the last text has bytes, digits and scripts that training never
    # met
    for text in [*TEXTS, "cafe\u0301 <think>\n\n</think>\n\n", " \n\n \n12.50\tЖук 日本 \U0001f680"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False) == small_tokenizer().encode(text).ids
    for text in TEXTS:
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token, theirs.pad_token, theirs.model_max_length) == ("<|im_end|>", "<|endoftext|>", 16384)
    assert ours.eos_id == theirs.eos_token_id
    assert len(theirs) == ours.vocab_size == 400
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.source == theirs.chat_template


def test_added_tokens_are_the_last_ids_in_published_order() -> None:
    tokenizer = small_tokenizer()
    added = tokenizer.get_added_tokens_decoder()
    assert [*added] == [*range(400 - 26, 400)]
    assert [added[id].content for id in (374, 375, 376)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    shown = [token.content for token in added.values() if not token.special]
    assert {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"} < set(shown)


def test_training_is_deterministic() -> None:
    first, second = (tiny.train(TEXTS * 2, vocab_size=350).to_str() for _ in range(2))
    assert first == second


def test_a_word_frequent_in_one_text_gets_no_token() -> None:
    tokenizer = tiny.train([*TEXTS, *TEXTS, "zwrokzwrok " * 1000], vocab_size=350)
    assert "zwrok" not in tokenizer.get_vocab()


def test_added_tokens_in_texts_get_no_merges() -> None:
    assert not [
        token for token in small_tokenizer().get_vocab(with_added_tokens=False) if "<|" in token or "im" in token
    ]


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size: 4096"):
        tiny.train(TEXTS)
