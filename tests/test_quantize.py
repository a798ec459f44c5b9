"""`agentspec quantize`: the written checkpoint has exactly the rounded weights, transformers reads the same ones, and
it is written completely or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentspec.commands import cli
from agentspec.engine import bundled
from agentspec.kernels import Weight, quantize_blocks
from agentspec.models import shard_files
from agentspec.models.hf_config import load_text_config
from agentspec.models.quantization import is_convertible
from agentspec.models.weights import Checkpoint
from tests.fakes.checkpoints import Family, rewrite, write_checkpoint
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")


def load(directory: Path) -> dict[str, Weight]:
    config = load_text_config(directory)
    with Checkpoint(directory) as checkpoint:
        if config.num_mtp_layers is None:
            config = config.with_mtp_layers(int(checkpoint.has_mtp))
        return checkpoint.load(config, device=CPU, dtype=torch.float32)


def quantized(source: Path) -> Path:
    destination = source.with_name(source.name + "-fp8")
    assert cli.main(["quantize", str(source), str(destination)]) == 0
    return destination


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rounded(name: str, weight: Tensor) -> Tensor:
    """The rounded values of a parameter. Projections of experts are separate tensors in the official format and don't
    share blocks."""
    if not name.endswith("experts.gate_up_proj"):
        return quantize_blocks(weight).dequantize()
    return torch.cat([quantize_blocks(part).dequantize() for part in weight.chunk(2, 1)], 1)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("dense", {}),
        ("dense", {"namespace": "flat", "dtype": torch.bfloat16, "tied": True}),
        ("dense", {"sharded": True, "mtp": False, "intermediate_size": 300, "hidden_size": 160}),
        ("moe", {"dtype": torch.bfloat16, "control_dtype": torch.float32}),
        ("moe", {"experts": "split", "mtp_experts": "fused"}),
        ("next", {"dtype": torch.bfloat16}),
    ],
)
def test_the_quantised_checkpoint_loads_to_the_rounded_weights(
    family: Family, options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "full", family, **{"num_hidden_layers": 4} | options)
    before, after = load(source), load(quantized(source))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        packed = family == "next" and ("in_proj_qkv" in name or "in_proj_z" in name)
        want = rounded(name, weight.tensor) if is_convertible(name) and not packed else weight.tensor
        assert torch.equal(after[name].dequantize(), want), name


def test_the_format_is_the_official_one(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "full", "moe", num_hidden_layers=4, dtype=torch.bfloat16)
    before, after = tensors_of(source), tensors_of(quantized(source))
    prefix = "model.language_model.layers.0."
    assert not [name for name in after if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert after[f"{prefix}mlp.experts.7.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert after[f"{prefix}mlp.experts.7.up_proj.weight_scale_inv"].dtype == torch.bfloat16
    assert after[f"{prefix}linear_attn.in_proj_qkv.weight_scale_inv"].shape == (2, 1)
    assert after["mtp.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    for name in before.keys() & after.keys():
        if f"{name}_scale_inv" not in after:
            assert before[name].dtype == after[name].dtype, name
            assert torch.equal(before[name], after[name]), name
    kept = {name for name in after if not name.endswith("_scale_inv") and f"{name}_scale_inv" not in after}
    for part in ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight"):
        assert f"{prefix}linear_attn.{part}" in kept
    assert {
        "lm_head.weight",
        "mtp.fc.weight",
        f"{prefix}mlp.gate.weight",
        f"{prefix}mlp.shared_expert_gate.weight",
    } <= kept
    assert "model.visual.blocks.1.attn.qkv.weight" in kept


def test_the_config_lists_unconverted_modules_by_their_names(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "full", "moe", num_hidden_layers=4)
    raw = json.loads((source / "config.json").read_text())
    written = json.loads((quantized(source) / "config.json").read_text())
    quantization = written.pop("quantization_config")
    assert written == raw
    listed = set(quantization.pop("modules_to_not_convert"))
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    prefix = "model.language_model.layers.0."
    assert {
        "lm_head",
        "mtp.fc",
        f"{prefix}mlp.gate",
        f"{prefix}linear_attn.in_proj_a",
        "model.visual.merger.linear_fc1",
    } <= listed
    assert f"{prefix}linear_attn" not in listed
    assert not [name for name in listed if name.endswith(("q_proj", "up_proj", "in_proj_qkv", "out_proj"))]


def test_other_files_are_copied_but_no_other_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "full", "dense", num_hidden_layers=4, sharded=True)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(f"{name}'s text")
    (source / "pytorch_model.bin").touch()
    destination = quantized(source)
    assert sorted(path.name for path in destination.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (destination / "tokenizer.json").read_text() == "tokenizer.json's text"
    assert len({path.stat().st_mode for path in destination.iterdir()}) == 1, (
        "the weights have the config's permissions"
    )


def test_shards_are_below_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "full", "moe", num_hidden_layers=4)
    whole = load(quantized(source))
    (tmp_path / "full-fp8").rename(tmp_path / "whole")
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 100_000)
    destination = quantized(source)
    files = sorted(destination.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert all(sum(tensor.nbytes for tensor in load_file(path).values()) <= 100_000 for path in files)
    index = json.loads((destination / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(destination).values())
    for name, weight in load(destination).items():
        assert torch.equal(weight.dequantize(), whole[name].dequantize()), name


def test_the_sizes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "full", "dense", num_hidden_layers=4)
    before = sum(tensor.nbytes for tensor in tensors_of(source).values())
    after = sum(tensor.nbytes for tensor in tensors_of(quantized(source)).values())
    said = capsys.readouterr().out
    assert f"{after / 1e6:,.1f} MB of weights, {before / 1e6:,.1f} MB before" in said
    assert 0.2 < after / before < 0.9


@pytest.mark.parametrize("there", ["directory", "file", "dangling link"])
def test_an_existing_destination_is_refused(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "full", "dense", num_hidden_layers=4)
    destination = tmp_path / "there"
    match there:
        case "directory":
            destination.mkdir()
        case "file":
            destination.touch()
        case _:
            destination.symlink_to(tmp_path / "nowhere")
    assert cli.main(["quantize", str(source), str(destination)]) == cli.USER_ERROR
    assert f"{destination}: exists already" in capsys.readouterr().err


def test_a_failure_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "full", "dense", num_hidden_layers=4)
    name = "mtp.layers.0.mlp.down_proj.weight"
    rewrite(source, lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    assert cli.main(["quantize", str(source), str(tmp_path / "out")]) == cli.USER_ERROR
    assert f"{name}: holds values that aren't finite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("defect", ["missing tensor", "in 8 bits already", "no parent"])
def test_an_unsupported_checkpoint_is_refused_by_name(
    defect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, destination = write_checkpoint(tmp_path / "full", "dense", num_hidden_layers=4), tmp_path / "out"
    if defect == "missing tensor":
        rewrite(source, lambda tensors: tensors.pop("mtp.fc.weight"))
    elif defect == "in 8 bits already":
        source = quantized(source)
    else:
        destination = tmp_path / "nowhere" / "out"
    assert cli.main(["quantize", str(source), str(destination)]) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert {
        "missing tensor": "missing tensors: mtp.fc.weight",
        "in 8 bits already": "is in 8 bits already",
        "no parent": "nowhere: no such",
    }[defect] in said
    assert not destination.exists()


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_transformers_computes_the_same_logits(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU transformers expands such a checkpoint at load. Its block sizes equal ours where dimensions are
    multiples of a block, or 1."""
    transformers = pytest.importorskip("transformers")
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(
        quantizer, "is_accelerate_available", lambda: True
    )  # transformers asks for it to place models on devices, which isn't done here
    source = write_checkpoint(
        tmp_path / "full", family, namespace="flat", num_hidden_layers=4, linear_num_value_heads=4, mtp=False
    )
    directory = quantized(source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    token_ids = torch.arange(3, 60)
    with torch.no_grad():
        want = theirs(token_ids[None]).logits[0]
    model = load_model(directory, device=CPU, dtype=torch.float32)
    got = model.logits(Driver(model).prefill(token_ids.tolist()))
    real = model.spec.num_real_tokens
    torch.testing.assert_close(got[:, :real], want[:, :real], rtol=1e-4, atol=1e-4)
    full = load_model(source, device=CPU, dtype=torch.float32)
    assert not torch.allclose(
        full.logits(Driver(full).prefill(token_ids.tolist()))[:, :real], want[:, :real], rtol=1e-3, atol=1e-3
    )


def test_the_quantised_bundled_model_still_calls_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "tiny"
    assert cli.main(["quantize", bundled.NAME, str(directory)]) == 0
    assert "22.0 MB before" in capsys.readouterr().out
    assert (directory / "tokenizer.json").read_bytes() == (bundled.DIRECTORY / "tokenizer.json").read_bytes()
    workload = Path(__file__).parent.parent / "workloads" / "agentic.jsonl"
    flags = [
        "--sessions",
        "1",
        "--max-turns",
        "1",
        "--device",
        "cpu",
        "--quiet",
        "--json",
        str(tmp_path / "report.json"),
    ]
    assert cli.main(["replay", str(workload), "--model", str(directory), *flags]) == 0
    live = json.loads((tmp_path / "report.json").read_text())["live"]
    assert live["valid_calls"] == live["calls"] > 0
