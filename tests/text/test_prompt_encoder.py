"""Cached encoding of growing prompts gives the same ids and offsets as encoding the whole text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from agentspec.engine import bundled
from agentspec.text.prompt_encoder import PromptEncoder, Stretch
from agentspec.text.sentinels import ANY_SENTINEL, Sentinels
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import tokens

SCRAPS = (
    "a",
    "b ",
    " ",
    "\n",
    "tool",
    "<",
    "<a",
    "<ab",
    "|>",
    ">",
    "e",
    "\u0301",
    "é",
    "東",
    "🙂",
    "7",
    "</",
    "<|im_",
    "end|>",
    "<think",
    "\r\n",
)


def bundled_backend(**changes: Any) -> Backend:
    described = json.loads((bundled.DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))
    return Backend.from_str(json.dumps(described | changes))


def plain() -> Tokenizer:
    return Tokenizer(bundled_backend())


def confusing() -> Tokenizer:
    """Added tokens that share prefixes, contain each other, and absorb blanks next to them."""
    backend = bundled_backend()
    texts = ["<a", "<a>", "<ab", "<ab><a>", "<|im_end|><|im_", ">>>"]
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    backend.add_tokens([AddedToken("<s>", lstrip=True, rstrip=True, normalized=False)])
    return Tokenizer(backend)


def without_added() -> Tokenizer:
    return Tokenizer(bundled_backend(added_tokens=[]))


Encode = Callable[[str], list[int]]


def with_sentinels(tokenizer: Tokenizer, sentinels: Sentinels) -> Encode:
    def encode(text: str) -> list[int]:
        found: list[int] = []
        for part in ANY_SENTINEL.split(text):
            found += sentinels.ids_of.get(part) or tokenizer.encode_batch([part], added_tokens=False)[0]
        return found

    return encode


def from_nothing(encode: Encode, text: str, stretches: list[Stretch]) -> list[int]:
    ids: list[int] = []
    start = 0
    for stretch in stretches:
        ids += [*encode(text[start : stretch.start]), *stretch.token_ids]
        start = stretch.end
    return ids + encode(text[start:])


def place_from_nothing(encode: Encode, text: str, stretches: list[Stretch], mark: int) -> int:
    before = [stretch for stretch in stretches if stretch.start < mark]
    if before and before[-1].end > mark:
        return len(from_nothing(encode, text[: before[-1].start], before[:-1]))
    whole, head = from_nothing(encode, text, stretches), from_nothing(encode, text[:mark], before)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, head, strict=False)))


def grown(rng: random.Random, added: Sequence[str], text: str, stretches: list[Stretch]) -> tuple[str, list[Stretch]]:
    """Return a text that shares a random prefix with the last one, with some stretches at other places."""
    cut = len(text) if rng.random() < 0.6 else rng.randrange(len(text) + 1)
    text = text[:cut] + "".join(
        rng.choice(added) if rng.random() < 0.4 else rng.choice(SCRAPS) for _ in range(rng.randrange(12))
    )
    stretches = [stretch for stretch in stretches if stretch.end <= cut and rng.random() < 0.95]
    while rng.random() < 0.6:
        start = max([rng.randrange(len(text) + 1), *(stretch.end for stretch in stretches)])
        end = rng.randrange(start, len(text) + 1)
        if start:
            stretches.append(Stretch(start, end, tokens(rng.choices(range(50), k=rng.randint(1, 4)))))
    return text, stretches


@pytest.mark.parametrize("make", [plain, confusing, without_added])
@pytest.mark.parametrize("keeps_apart", [False, True], ids=["spelled", "sentinels"])
@pytest.mark.parametrize("seed", range(4))
def test_cached_encoding_equals_encoding_the_whole_text(
    make: Callable[[], Tokenizer], keeps_apart: bool, seed: int
) -> None:
    rng = random.Random(seed)
    tokenizer = make()
    sentinels = Sentinels(tokenizer if keeps_apart else None)
    encoder = PromptEncoder(tokenizer, sentinels, max_bytes=20_000)
    encode = with_sentinels(tokenizer, sentinels) if sentinels else tokenizer.encode
    added = [token.text for token in tokenizer.added_tokens] or ["x"]
    added += [sentinels.of(text) for text in added]
    for conversation in range(60):
        text, stretches, keys = "", list[Stretch](), list[bytes]()
        for turn in range(rng.randint(1, 12)):
            text, stretches = grown(rng, added, text, stretches)
            keys.append(b"%d-%d" % (conversation, rng.randrange(20)))
            told = keys if rng.random() < 0.9 else []
            prompt = encoder.encode(text, stretches, told)
            where = f"seed {seed}, conversation {conversation}, turn {turn}: {text!r} with {stretches}"
            assert list(prompt.ids) == from_nothing(encode, text, stretches), where
            for mark in {0, len(text), rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)}:
                expected = place_from_nothing(encode, text, stretches, mark)
                assert encoder.token_offset(prompt, mark) == expected, f"{where}, mark {mark}"
            assert encoder.num_bytes <= 20_000


def test_only_new_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = plain()
    encoder = PromptEncoder(tokenizer)
    first = "<|im_start|>user\nhello<|im_end|>\n" * 50
    stretch = Stretch(len(first), len(first) + 4, tokens([1, 2]))
    encoder.encode(first, [], [b"one"])
    looked_at: list[str] = []
    pieces = encoder._pieces.pieces
    monkeypatch.setattr(encoder._pieces, "pieces", lambda text: looked_at.append(text) or pieces(text))
    second = first + "said<|im_end|>\nmore"
    assert list(encoder.encode(second, [stretch], [b"one", b"two"]).ids) == from_nothing(
        tokenizer.encode, second, [stretch]
    )
    assert sum(map(len, looked_at)) < len(second) - len(first) + 40
