"""The tokenizer of tiny-agent: byte-level BPE with the Qwen3.5 added tokens, in which a word has the same tokens
wherever it stands.

    python -m scripts.tiny_agent.tokenizer --out build/tiny-agent [--seed 0] [--sessions 6000]

Owns the split into pieces and the vocabulary. A small model has to copy words from schemas and results into calls, so
no piece holds a word together with the space, quote or bracket beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scripts.tiny_agent.render import conversation_text
from scripts.tiny_agent.sessions import make_example

VOCAB_SIZE = 4096
MODEL_MAX_LENGTH = 16384
DEFAULT_DIRECTORY = Path("build/tiny-agent")
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

_WORD = r"[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[\p{Lu}\p{Lt}]+"
_RUN = r"(?:[^\p{L}\p{M}\p{N}\n\\]|\\(?!n))"
_PIECES = rf"{_WORD}|\p{{N}}|{_RUN}*(?:\n+|(?:\\n)+)|{_RUN}+"
"""Words, which end where a capital follows a small letter (dueDate is due and Date); single digits; runs of anything
else, which newlines end, also those that JSON writes as an escape: its n is no part of the word that follows."""

_CONTROL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_VISIBLE_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added tokens that are part of the visible text: special=false, as published."""


def train(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on the texts and add the published added tokens, in their published order.

    A piece counts once a text, so that a made-up name that fills one session doesn't earn tokens of its own; added
    tokens in the text don't count. Raises ValueError when the texts are too few for `vocab_size` tokens."""
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    num_added = len(_CONTROL_TOKENS) + len(_VISIBLE_TOKENS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_added, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_distinct_pieces(texts, split), trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _VISIBLE_TOKENS])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise ValueError(f"vocab_size: {vocab_size} tokens need more text than this, which has {size}")
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(CHAT_TEMPLATE, directory / "chat_template.jinja")


def session_texts(seed: int, count: int) -> Iterator[str]:
    """The first sessions of the train split, as the model reads them."""
    for index in range(count):
        example = make_example(seed, index, split="train")
        yield conversation_text(example, len(example.turns))


def _distinct_pieces(texts: Iterable[str], split: pre_tokenizers.Split) -> Iterator[list[str]]:
    added = re.compile("|".join(re.escape(token) for token in (*_CONTROL_TOKENS, *_VISIBLE_TOKENS)))
    for text in texts:
        yield sorted({piece for part in added.split(text) for piece, _ in split.pre_tokenize_str(part)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the tokenizer of tiny-agent and write it with the chat template."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_DIRECTORY,
        metavar="DIR",
        help="made if it doesn't exist; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sessions; default: %(default)s")
    parser.add_argument(
        "--sessions", type=int, default=6000, metavar="N", help="how many to learn from; default: %(default)s"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(train(session_texts(arguments.seed, arguments.sessions)), arguments.out)


if __name__ == "__main__":
    main()
