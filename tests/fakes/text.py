"""A tokenizer of one token per byte with the bundled chat template, for tests that need text but no trained
vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentspec.engine import bundled

TEMPLATE_FILE = bundled.DIRECTORY / "chat_template.jinja"
"""It writes Qwen3.5's format."""

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
VISIBLE_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def byte_backend() -> Tokenizer:
    """256 byte tokens (ids 0 to 255, in the order of their spelling), then CONTROL_TOKENS, then VISIBLE_TOKENS: 265
    ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in VISIBLE_TOKENS])
    return backend


def write_text_assets(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_backend().save(str(directory / "tokenizer.json"))
    config = {"eos_token": END_OF_TURN, "pad_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copyfile(TEMPLATE_FILE, directory / "chat_template.jinja")
