"""Texts that are too long are refused before or during encoding; all other ids are unchanged."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from agentspec.errors import ContextLengthError
from agentspec.text import token_limit
from agentspec.text.token_limit import TokenLimit, encode_within
from agentspec.text.tokenizer import Tokenizer
from tests.fakes.text import byte_backend

SCRAPS = (
    "word",
    " a b",
    "  ",
    "\n",
    " 12",
    "it's",
    "'",
    "é",
    "e\u0301",
    "\u1fbe\u0308\u0301",
    "東京",
    "\u2126",
    "🙂",
    "\t",
    "A Bc",
    ".",
    " don't X",
    "\r\n",
)


def like_qwen(
    pattern: str = max(token_limit._CUTTABLE_PATTERNS), *, behavior: str = "isolated", normalizer: Any = None
) -> Backend:
    """Return a small BPE with the components of Qwen's tokenizers."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizer or normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior=behavior)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(["a word and words, don't you", "it's 東京 é A Bc"] * 9, trainer)
    backend.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return backend


def some_text(rng: random.Random, most: int = 60) -> str:
    return "".join(rng.choice(SCRAPS) for _ in range(rng.randrange(most)))


@pytest.mark.parametrize("pattern", sorted(token_limit._CUTTABLE_PATTERNS))
def test_text_encoded_in_parts_has_the_ids_of_the_whole(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(like_qwen(pattern))
    assert tokenizer.cuts_at_words
    monkeypatch.setattr(token_limit, "_PART_CHARACTERS", 5)
    monkeypatch.setattr(token_limit, "_BATCH_CHARACTERS", 30)
    rng = random.Random(7)
    for trial in range(1000):
        texts = [some_text(rng) for _ in range(rng.randrange(4))]
        found = encode_within(tokenizer, texts, each=TokenLimit(10**6))
        assert [list(ids) for ids in found] == tokenizer.encode_batch(texts), f"seed 7, trial {trial}: {texts}"


def test_token_bounds_hold_for_random_texts(tokenizer: Tokenizer) -> None:
    rng = random.Random(8)
    for one in (tokenizer, Tokenizer(like_qwen()), Tokenizer(byte_backend())):
        assert one.bounds is not None
        for _ in range(50):
            letters, token = (
                "".join(rng.choice("abcdeXY") for _ in range(rng.randrange(200))),
                max(one.token_bytes, key=len).decode() * 50,
            )
            for text in (
                some_text(rng, 2000),
                "e\u0301" * 90,
                letters + "\u0301\u212a",
                "\u1fbe\u0308\u0301" * 50,
                letters,
                token,
                letters + token + " " * 500,
            ):
                for form in ("NFC", "NFD"):
                    data = unicodedata.normalize(form, text).encode()
                    assert one.bounds.least_tokens(data) <= len(one.encode(data.decode())), f"seed 8: {text!r}"


def without_a_byte() -> Backend:
    backend = byte_backend()
    vocab = {token: place for place, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[1:])}
    backend.model = models.BPE(vocab=vocab, merges=[])
    return backend


def that_takes_blanks() -> Backend:
    backend = byte_backend()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        like_qwen(behavior="removed"),
        like_qwen(normalizer=normalizers.Replace("a", "")),
        without_a_byte(),
        that_takes_blanks(),
    ],
    ids=[
        "a split that drops text",
        "a normaliser that drops text",
        "a byte without a token",
        "a token that takes blanks",
    ],
)
def test_tokenizers_that_may_drop_text_have_no_bounds(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    assert tokenizer.bounds is None
    assert not tokenizer.cuts_at_words


def test_unknown_pre_tokenizer_is_not_cut_at_words() -> None:
    assert not Tokenizer(like_qwen(r"(?<=a) |\w+|\W+")).cuts_at_words


class Watched:
    """A tokenizer that counts the encoded characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bounds, self.cuts_at_words = tokenizer.bounds, tokenizer.cuts_at_words
        self.num_characters = 0
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str], *, added_tokens: bool = True) -> list[list[int]]:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts, added_tokens=added_tokens)


def test_text_with_too_many_bytes_is_not_encoded(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer)
    with pytest.raises(ContextLengthError, match="25,165,824 bytes': exceeds the context limit of 8192 tokens"):
        encode_within(watched, ["a word  " * (3 << 20)], each=TokenLimit(8192))
    assert watched.num_characters == 0


@pytest.mark.parametrize("kind", ["each", "together"])
def test_encoding_stops_at_too_many_ids(kind: str) -> None:
    watched = Watched(Tokenizer(like_qwen()))
    assert watched.bounds is not None
    texts = ["a b 1234567890 " * (1 << 19)] if kind == "each" else ["a b 1234567890 " * 5000] * 100
    limit = TokenLimit(max(watched.bounds.least_tokens(text.encode()) for text in texts), 1 if kind == "each" else 2)
    limits: dict[str, Any] = {kind: limit}
    with pytest.raises(ContextLengthError, match=r"more than [0-9]+ tokens"):
        encode_within(watched, texts, **limits)
    assert watched.num_characters < sum(map(len, texts)) / 2
