"""The sample checkpoint is a published-layout Qwen3.5 checkpoint, the same for the same seed and corpus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from agentspec.text.chat_template import ChatTemplate
from agentspec.text.messages import normalise
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import detect_dialect
from tests.fakes.text import write_text_assets
from tests.text.conftest import SCRIPT, make_checkpoint
from tests.text.conversations import CONVERSATIONS, TOOLS


def test_files_are_reproducible(checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    again = make_checkpoint(tmp_path / "again", "--corpus", str(corpus))
    names = sorted(file.name for file in checkpoint.iterdir())
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all((again / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)


def test_layout(checkpoint: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    text = config["text_config"]
    assert (config["model_type"], text["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert text["vocab_size"] % 64 == 0
    assert 0 <= text["vocab_size"] - tokenizer.vocab_size < 64
    assert text["layer_types"].count("full_attention") == 2
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {name.partition(".")[0] for name in kinds} == {"model", "mtp", "lm_head"}
    assert sum(name.startswith("mtp.") for name in kinds) == 15
    assert all((kind == "F32") == name.endswith(("A_log", "linear_attn.norm.weight")) for name, kind in kinds.items())
    ends = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.special_ids["<|im_end|>"], tokenizer.special_ids["<|endoftext|>"]]
    assert AutoConfig.from_pretrained(checkpoint).get_text_config().mtp_num_hidden_layers == 1


def test_transformers_reads_the_same_text(checkpoint: Path, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    reference = AutoTokenizer.from_pretrained(checkpoint)
    rendered = template.render(normalise(CONVERSATIONS["tool loop"]), TOOLS)
    assert tokenizer.encode(rendered.text) == reference.apply_chat_template(
        CONVERSATIONS["tool loop"], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert detect_dialect(template.source) == "qwen3_coder"


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    run = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "out"), "--corpus", str(missing)], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert str(missing) in run.stderr


def test_fake_assets_speak_the_same_format(tmp_path: Path, template: ChatTemplate) -> None:
    write_text_assets(tmp_path)
    tokenizer, fake = Tokenizer.from_directory(tmp_path), ChatTemplate.from_directory(tmp_path)
    assert tokenizer is not None
    assert fake is not None
    assert tokenizer.vocab_size == 265
    text = template.render(normalise(CONVERSATIONS["tool loop"]), TOOLS).text
    assert fake.render(normalise(CONVERSATIONS["tool loop"]), TOOLS).text == text
    assert all(name in tokenizer.special_ids or tokenizer.id_of(name) is not None for name in ("<|im_start|>", "<think>", "<tool_response>"))
