"""A small tokenizer of the Qwen3.5 kind: byte-level BPE behind its pre-tokeniser, with its added tokens.

Knows nothing of the text it is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

NUM_MERGES = 4000

_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The split that Qwen3.5's tokenizer makes before BPE: marks stay with letters, digits stand alone."""

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

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


def train(texts: Iterable[str]) -> Tokenizer:
    """Train on the texts and add the published added tokens, in their published order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + NUM_MERGES, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _VISIBLE_TOKENS])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
