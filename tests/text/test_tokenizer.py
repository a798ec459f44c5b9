"""The byte table is the tokenizer's, piecewise encoding is whole encoding, and unusable files are refused by name."""

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


def test_every_byte_and_token_has_its_bytes(tokenizer: Tokenizer, backend: Backend) -> None:
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert b"".join(
            tokenizer.token_bytes[token_id] for token_id in ids
        ).decode() == backend.normalizer.normalize_str(text)
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_control_tokens_never_show_and_the_others_do(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>assistant\n<think>\nso\n</think>\n\n<tool_call>\n</tool_call><|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.special_ids["<|im_start|>"]
    assert ids[-1] == tokenizer.special_ids["<|im_end|>"] == tokenizer.eos_id
    assert tokenizer.id_of("<think>") in ids
    assert tokenizer.decode(ids) == text.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    assert "<think>" not in tokenizer.special_ids
    assert tokenizer.id_of("hello") is None


def test_pieces_encode_to_the_whole(tokenizer: Tokenizer) -> None:
    """Piecewise equals whole, on text made to provoke merges across the cuts, with a cache too small to keep much."""
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


def test_no_cut_beside_tokens_that_look_at_their_neighbours() -> None:
    """A token that takes whitespace from its neighbours, or is matched in normalised text, keeps them in its piece."""
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


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


def test_named_end_of_turn(tmp_path: Path) -> None:
    write_text_assets(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 265
    assert tokenizer.eos_id == tokenizer.special_ids["<|im_end|>"]
    (tmp_path / "tokenizer_config.json").unlink()
    unnamed = Tokenizer.from_directory(tmp_path)
    assert unnamed is not None
    assert unnamed.eos_id is None


def test_ids_without_a_token_stand_for_nothing() -> None:
    tokenizer = Tokenizer(Backend(models.BPE(vocab={"a": 0, "b": 3}, merges=[])))
    assert tokenizer.token_bytes == [b"a", b"", b"", b"b"]
    assert tokenizer.decode([0, 1, 3]) == "ab"


@pytest.mark.parametrize("text", ["{", "[]", '{"model": 1}'])
def test_unusable_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_only_byte_level_vocabularies() -> None:
    with pytest.raises(CheckpointError, match=r"▁the.*byte-level"):
        Tokenizer(Backend(models.BPE(vocab={"▁the": 0}, merges=[])))


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        tokenizer.encode("abc \ud800")


def test_text_on_which_the_library_panics_is_refused_and_the_next_is_read(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"can't be tokenised \(4,000,002 characters\)"):
        tokenizer.encode("a" + " " * 4_000_000 + "x")
    assert tokenizer.decode(tokenizer.encode("as before")) == "as before"


def test_an_id_beyond_every_vocabulary_is_refused(tmp_path: Path) -> None:
    """A table of all ids is made."""
    tokenizer = json.loads(byte_backend().to_str())
    tokenizer["model"]["vocab"]["!"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: a token has the id 2147483648; ids must be below 4,194,304"
    ):
        Tokenizer.from_directory(tmp_path)
