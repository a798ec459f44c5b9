"""Every checkpoint layout loads the same parameters; every defect is refused with the tensors' names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentspec.errors import CheckpointError
from agentspec.models.hf_config import load_text_config
from agentspec.models.tensors import parameter_shapes
from agentspec.models.weights import Checkpoint, resolve_checkpoint
from tests.fakes.checkpoints import Family, rewrite, write_checkpoint
from tests.fakes.loaded import load_model

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"sharded": True},
    "flat": {"namespace": "flat"},
    "no vision": {"vision": False},
    "experts split": {"experts": "split"},
    "experts split, head fused": {"experts": "split", "mtp_experts": "fused"},
    "experts fused, head fused": {"experts": "fused", "mtp_experts": "fused"},
    "flat, sharded, split": {"namespace": "flat", "sharded": True, "experts": "split"},
}


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    with Checkpoint(directory) as checkpoint:
        config = load_text_config(directory)
        if config.num_mtp_layers is None:
            config = config.with_mtp_layers(int(checkpoint.has_mtp))
        loaded = checkpoint.load(config, device=CPU, dtype=dtype)
    parameters = {name: parameter.tensor for name, parameter in loaded.items()}
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == parameter_shapes(config)
    return parameters


def small(directory: Path, family: Family = "dense", **options: Any) -> Path:
    return write_checkpoint(directory, family, num_hidden_layers=4, **options)


@pytest.mark.parametrize("family", ["dense", "moe", "next"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_load_equal_parameters(family: Family, layout: str, tmp_path: Path) -> None:
    expected = load(small(tmp_path / "plain", family))
    for name, tensor in load(small(tmp_path / "other", family, **LAYOUTS[layout])).items():
        assert torch.equal(tensor, expected[name]), name


def test_next_packed_projections_are_unpacked(tmp_path: Path) -> None:
    """With the same seed the MoE family has the same tensors, not packed."""
    packed, plain = load(small(tmp_path / "next", "next")), load(small(tmp_path / "moe", "moe"))
    for name, tensor in packed.items():
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_control_tensors_are_float32_in_a_bfloat16_model(stored: torch.dtype, tmp_path: Path) -> None:
    directory = small(tmp_path, dtype=torch.bfloat16, control_dtype=stored)
    raw = {
        name.replace("model.language_model.", "model."): t
        for name, t in load_file(directory / "model.safetensors").items()
    }
    for name, tensor in load(directory, torch.bfloat16).items():
        control = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if control else torch.bfloat16), name
        assert torch.equal(tensor, raw[name].to(tensor.dtype)), name


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = load_model(small(tmp_path, tied=True), device=CPU, dtype=torch.float32)
    embedding = load(tmp_path)["model.embed_tokens.weight"]
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.logits(hidden), hidden @ embedding.T)


@pytest.mark.parametrize("family", ["dense", "next"])
def test_mtp_head_is_detected_from_tensors(family: Family, tmp_path: Path) -> None:
    for mtp in (True, False):
        directory = small(tmp_path / f"{family}{mtp}", family, mtp=mtp, mtp_num_hidden_layers=None)
        assert load_model(directory, device=CPU, dtype=torch.float32).spec.has_mtp == mtp


LM = "model.language_model."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LM}layers.2.linear_attn.A_log"), r"missing tensors: model\.layers\.2\.linear_attn\.A_log"),
        (lambda t: t.pop("mtp.fc.weight"), r"missing tensors: mtp\.fc\.weight"),
        (lambda t: t.update({"model.audio.weight": torch.zeros(1)}), r"unexpected tensors: model\.audio\.weight"),
        (
            lambda t: t.update({f"{LM}layers.0.mlp.gate_proj.weight_scale_inv": torch.zeros(1)}),
            r"unexpected tensors: model\.layers\.0\.mlp\.gate_proj\.weight_scale_inv",
        ),
        (
            lambda t: t.update(
                {f"{LM}norm.weight": torch.zeros(63), f"{LM}layers.0.linear_attn.dt_bias": torch.zeros(6, 1)}
            ),
            r"model\.layers\.0\.linear_attn\.dt_bias has shape \[6, 1\], expected \[6\]; "
            r"model\.norm\.weight has shape \[63\], expected \[64\]",
        ),
        (
            lambda t: t.update({f"{LM}norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"F32, F16 or BF16: model\.norm\.weight \(I8\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64)}), r"model\.norm\.weight is filled twice"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")], "set mtp_num_hidden_layers to 0"),
    ],
)
def test_checkpoint_defect_is_named(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(rewrite(small(tmp_path), change))


def test_lm_head_with_tied_embedding_is_refused(tmp_path: Path) -> None:
    directory = small(tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: lm_head\.weight.*tie_word_embeddings"):
        load(directory)


def test_mtp_tensors_are_refused_if_config_has_no_mtp(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unexpected tensors: mtp\.fc\.weight"):
        load(small(tmp_path, mtp_num_hidden_layers=0))


@pytest.mark.parametrize("family", ["moe", "next"])
def test_missing_expert_is_named(family: Family, tmp_path: Path) -> None:
    name = ("model." if family == "next" else LM) + "layers.1.mlp.experts.5.up_proj.weight"
    directory = rewrite(small(tmp_path, family, experts="split"), lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight$"):
        load(directory)


def test_surplus_expert_is_named(tmp_path: Path) -> None:
    extra = {f"mtp.layers.0.mlp.experts.8.{part}_proj.weight": torch.zeros(1) for part in ("gate", "up", "down")}
    directory = rewrite(small(tmp_path, "moe"), lambda t: t.update(extra))
    with pytest.raises(
        CheckpointError, match=r"unexpected tensors: mtp\.layers\.0\.mlp\.experts\.8\.down_proj\.weight"
    ):
        load(directory)


def test_long_name_lists_are_shortened(tmp_path: Path) -> None:
    directory = rewrite(small(tmp_path), lambda t: [t.pop(n) for n in list(t) if ".layers." in n and "mtp" not in n])
    with pytest.raises(CheckpointError, match=r"and 3\d more"):
        load(directory)


def test_pickle_files_are_refused(tmp_path: Path) -> None:
    (small(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle files are refused.*pytorch_model\.bin"):
        load(tmp_path)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (small(tmp_path) / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (small(tmp_path, sharded=True) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors"):
        Checkpoint(tmp_path)


def _edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("lm_head.weight"), r"does not hold what the index says; unlisted: lm_head\.weight"),
        (lambda m: m.update({"extra": m["lm_head.weight"]}), r"does not hold what the index says; missing: extra"),
        (lambda m: m.update({"lm_head.weight": "../model.safetensors"}), "not a plain file name"),
        (lambda m: m.clear(), "weight_map is missing or empty"),
    ],
)
def test_index_that_contradicts_shards_is_refused(
    change: Callable[[dict[str, str]], object], message: str, tmp_path: Path
) -> None:
    _edit_index(small(tmp_path, sharded=True), change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_resolve_returns_local_directory_unchanged(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_resolve_refuses_missing_directory(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_checkpoint(model)


def test_resolve_refuses_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint(str(tmp_path / "model.safetensors"))


def test_resolve_downloads_only_safetensors_json_and_templates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}

    def snapshot(repo: str, *, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_checkpoint("Qwen/Qwen3.5-4B") == tmp_path
    assert asked == {"Qwen/Qwen3.5-4B": ["*.json", "*.safetensors", "*.jinja"]}


def test_resolve_reports_hub_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repo: str, **_: Any) -> str:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen3\.5-4B.*no route"):
        resolve_checkpoint("Qwen/Qwen3.5-4B")


def test_huge_num_experts_is_refused_before_names_are_built(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "next", "next")
    config = load_text_config(directory)
    assert config.moe is not None
    asked = dataclasses.replace(
        config, moe=dataclasses.replace(config.moe, num_experts=8192), layer_types=config.layer_types * 100
    )
    with (
        Checkpoint(directory) as checkpoint,
        pytest.raises(CheckpointError, match=r"tensors can't hold num_experts=8192 for 800 layers"),
    ):
        checkpoint.layout(asked)
