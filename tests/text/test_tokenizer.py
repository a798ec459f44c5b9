"""The byte table matches the tokenizer, piecewise encoding equals whole encoding, and errors name unusable files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from agentspec.engine import bundled
from agentspec.errors import CheckpointError, RequestError
from agentspec.text.piece_encoder import PieceEncoder
from agentspec.text.tokenizer import Tokenizer
from tests.fakes.text import byte_backend, write_text_assets

SAMPLES = (
    "Hello, Zürich! 東京 is é and e\u0301.",
    "a  b\n\n\nc\t \r\n",
    "x = 12345 # 🙂👩‍👩‍👧",
    '{"a": [1, null]}',
    "</tool_call>",
    "",
)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend.from_file(str(bundled.DIRECTORY / "tokenizer.json"))


def test_byte_table_covers_every_byte_and_token(tokenizer: Tokenizer, backend: Backend) -> None:
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert b"".join(
            tokenizer.token_bytes[token_id] for token_id in ids
        ).decode() == backend.normalizer.normalize_str(text)
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_control_tokens_are_hidden_and_other_added_tokens_shown(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>assistant\n<think>\nso\n</think>\n\n<tool_call>\n</tool_call><|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.special_ids["<|im_start|>"]
    assert ids[-1] == tokenizer.special_ids["<|im_end|>"] == tokenizer.eos_id
    assert tokenizer.id_of("<think>") in ids
    assert tokenizer.decode(ids) == text.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    assert "<think>" not in tokenizer.special_ids
    assert tokenizer.id_of("hello") is None


def test_piecewise_encoding_equals_whole_encoding(tokenizer: Tokenizer) -> None:
    """On text that provokes merges across cuts, with a small cache."""
    rng = random.Random(20)
    added = [token.text for token in tokenizer.added_tokens]
    scraps = (
        "\n",
        "\n\n",
        " ",
        "  ",
        "a",
        " the",
        "<",
        "<|im",
        "|>",
        "tool_call",
        "</",
        "e",
        "\u0301",
        "é",
        "東",
        "🙂",
        "9",
        "'s",
        "<think",
        ">",
        "\r\n",
    )
    encoder = PieceEncoder(tokenizer, max_bytes=2000)
    for trial in range(2000):
        text = "".join(
            rng.choice(added) if rng.random() < 0.3 else rng.choice(scraps) for _ in range(rng.randrange(30))
        )
        assert "".join(encoder.pieces(text)) == text
        assert encoder.num_bytes <= 2000
        assert list(encoder.encode(text)) == tokenizer.encode(text), f"seed 20, trial {trial}: {text!r}"


def test_text_is_not_cut_next_to_tokens_that_absorb_whitespace() -> None:
    """A token that absorbs whitespace, or is matched in normalised text, stays in one piece with its neighbours."""
    backend = byte_backend()
    backend.add_tokens(
        [
            AddedToken("<strip>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("<word>", single_word=True, normalized=False),
        ]
    )
    tokenizer = Tokenizer(backend)
    encoder = PieceEncoder(tokenizer)
    text = "a <strip> <think>b<word>c <word> d<|im_end|>"
    assert encoder.pieces(text) == ["a <strip> ", "<think>", "b<word>c <word> d", "<|im_end|>"]
    assert list(encoder.encode(text)) == tokenizer.encode(text)


def test_directory_without_tokenizer_returns_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


def test_eos_id_comes_from_the_named_token(tmp_path: Path) -> None:
    write_text_assets(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 265
    assert tokenizer.eos_id == tokenizer.special_ids["<|im_end|>"]
    (tmp_path / "tokenizer_config.json").unlink()
    unnamed = Tokenizer.from_directory(tmp_path)
    assert unnamed is not None
    assert unnamed.eos_id is None


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer = Tokenizer(Backend(models.BPE(vocab={"a": 0, "b": 3}, merges=[])))
    assert tokenizer.token_bytes == [b"a", b"", b"", b"b"]
    assert tokenizer.decode([0, 1, 3]) == "ab"


@pytest.mark.parametrize("text", ["{", "[]", '{"model": 1}'])
def test_unusable_tokenizer_error_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_vocabulary_must_be_byte_level() -> None:
    with pytest.raises(CheckpointError, match=r"▁the.*byte-level"):
        Tokenizer(Backend(models.BPE(vocab={"▁the": 0}, merges=[])))


def test_invalid_unicode_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        tokenizer.encode("abc \ud800")


def test_library_panic_rejects_one_text_only(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"can't be tokenised \(4,000,002 characters\)"):
        tokenizer.encode("a" + " " * 4_000_000 + "x")
    assert tokenizer.decode(tokenizer.encode("as before")) == "as before"


def test_token_id_above_the_vocabulary_limit_is_rejected(tmp_path: Path) -> None:
    """The byte table has an entry for every id below the greatest."""
    tokenizer = json.loads(byte_backend().to_str())
    tokenizer["model"]["vocab"]["!"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: a token has the id 2147483648; ids must be below 4,194,304"
    ):
        Tokenizer.from_directory(tmp_path)
