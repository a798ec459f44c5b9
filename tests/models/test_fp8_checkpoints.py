"""8-bit checkpoints: every layout loads the dequantised values, and inconsistent checkpoints are refused with the
tensors' names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.kernels import BlockScaled, Plain, Weight
from agentspec.models import quantization
from agentspec.models.checkpoint_layout import checkpoint_layout
from agentspec.models.hf_config import load_text_config
from agentspec.models.quantization import Fp8Blocks, is_convertible
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.tensors import random_parameters
from agentspec.models.weights import Checkpoint
from tests.fakes.checkpoints import Family, rewrite, write_checkpoint
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver
from tests.models.test_published_sizes import published_config

CPU = torch.device("cpu")
LM = "model.language_model."
LAYOUTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "dense, flat, sharded": ("dense", {"namespace": "flat", "sharded": True}),
    "dense, float32 multipliers": ("dense", {"scale_dtype": torch.float32}),
    "moe, experts split": ("moe", {"experts": "split"}),
    "moe, experts fused": ("moe", {"experts": "fused", "mtp_experts": "fused"}),
    "moe, trunk split, head fused": ("moe", {"experts": "split", "mtp_experts": "fused"}),
    "moe, trunk fused, head split": ("moe", {"experts": "fused", "mtp_experts": "split"}),
    "moe, experts wider than a block": (
        "moe",
        {"experts": "split", "moe_intermediate_size": 192, "hidden_size": 160, "num_experts": 4},
    ),
    "next, packed projections plain": ("next", {}),
}


@pytest.fixture
def keeps_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights in 8 bits, as on a GPU: the reference kernels accept them too."""
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)


def small(directory: Path, family: Family = "dense", **options: Any) -> Path:
    usual: dict[str, Any] = {"num_hidden_layers": 4, "fp8": "stored"}
    return write_checkpoint(directory, family, **usual | options)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Weight]:
    config = load_text_config(directory)
    with Checkpoint(directory) as checkpoint:
        if config.num_mtp_layers is None:
            config = config.with_mtp_layers(int(checkpoint.has_mtp))
        return checkpoint.load(config, device=CPU, dtype=dtype)


def logits(model: Qwen3_5Model) -> Tensor:
    driver = Driver(model)
    hidden = driver.prefill(list(range(20)))
    return torch.cat([model.logits(hidden), model.logits(driver.verify([[3, 1, 4]], [2])).flatten(0, -2)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_layout_loads_dequantised_values(layout: str, tmp_path: Path) -> None:
    family, options = LAYOUTS[layout]
    stored, expanded = (
        load(small(tmp_path / kind, family, **options | {"fp8": kind})) for kind in ("stored", "expanded")
    )
    assert stored.keys() == expanded.keys()
    for name, parameter in stored.items():
        assert torch.equal(parameter.tensor, expanded[name].tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_stay_block_scaled_if_device_keeps_blocks(layout: str, tmp_path: Path, keeps_blocks: None) -> None:
    family, options = LAYOUTS[layout]
    stored, expanded = (
        load(small(tmp_path / kind, family, **options | {"fp8": kind})) for kind in ("stored", "expanded")
    )
    for name, parameter in stored.items():
        packed = family == "next" and ("in_proj_qkv" in name or "in_proj_z" in name)
        assert isinstance(parameter, BlockScaled) == (is_convertible(name) and not packed), name
        assert torch.equal(parameter.dequantize(), expanded[name].dequantize()), name


@pytest.mark.parametrize(("family", "experts"), [("dense", None), ("moe", "split"), ("moe", "fused"), ("next", None)])
def test_block_scaled_model_equals_dequantised_model(
    family: Family, experts: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every kind of layer, the stacked projections have rows that don't fill whole blocks."""
    directory = small(tmp_path, family, experts=experts)
    plain = logits(load_model(directory, device=CPU, dtype=torch.float32))
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)
    torch.testing.assert_close(
        logits(load_model(directory, device=CPU, dtype=torch.float32)), plain, rtol=1e-5, atol=1e-5
    )


def test_bfloat16_load_rounds_once(tmp_path: Path) -> None:
    directory = small(tmp_path)
    exact, rounded = load(directory), load(directory, torch.bfloat16)
    for name in filter(is_convertible, exact):
        assert torch.equal(rounded[name].dequantize(), exact[name].dequantize().bfloat16().float()), name


@pytest.mark.parametrize(
    ("family", "options", "plain", "parameters"),
    [
        ("dense", {}, ("model.layers.1.mlp.down_proj",), ("model.layers.1.mlp.down_proj.weight",)),
        ("dense", {}, ("mtp.layers.0.self_attn.o_proj",), ("mtp.layers.0.self_attn.o_proj.weight",)),
        (
            "moe",
            {"experts": "fused"},
            ("model.layers.0.mlp.experts.gate_up_proj",),
            ("model.layers.0.mlp.experts.gate_up_proj",),
        ),
        (
            "moe",
            {"experts": "split"},
            tuple(f"model.layers.3.mlp.experts.{e}.down_proj" for e in range(8)),
            ("model.layers.3.mlp.experts.down_proj",),
        ),
    ],
)
def test_excluded_modules_stay_plain(
    family: Family,
    options: dict[str, Any],
    plain: tuple[str, ...],
    parameters: tuple[str, ...],
    tmp_path: Path,
    keeps_blocks: None,
) -> None:
    directory = small(tmp_path, family, plain=plain, **options)
    if family == "moe" and options["experts"] == "fused":
        exclude(directory, f"{LM}layers.0.mlp.experts.gate_up_proj")
    loaded = load(directory)
    assert {name for name, weight in loaded.items() if is_convertible(name) and isinstance(weight, Plain)} == set(
        parameters
    )


def test_excluding_fused_experts_module_excludes_both_stacks(tmp_path: Path, keeps_blocks: None) -> None:
    stacks = ("model.layers.2.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj")
    directory = exclude(small(tmp_path, "moe", experts="fused", plain=stacks), f"{LM}layers.2.mlp.experts")
    loaded = load(directory)
    assert {name for name, weight in loaded.items() if is_convertible(name) and isinstance(weight, Plain)} == set(
        stacks
    )


def exclude(directory: Path, *modules: str) -> Path:
    return edit_list(directory, lambda listed: [*listed, *modules])


def edit_list(directory: Path, change: Callable[[list[str]], list[str]]) -> Path:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["modules_to_not_convert"] = change(raw["quantization_config"]["modules_to_not_convert"])
    path.write_text(json.dumps(raw))
    return directory


O_PROJ = "model.layers.3.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LM}layers.3.self_attn.o_proj.weight_scale_inv"), rf"missing tensors: {O_PROJ}_scale_inv$"),
        (lambda t: t.pop(f"{LM}layers.3.self_attn.o_proj.weight"), rf"missing tensors: {O_PROJ}$"),
        (
            lambda t: [t.pop(f"mtp.layers.0.self_attn.{part}_proj.weight") for part in "qk"],
            r"missing tensors: mtp\.layers\.0\.self_attn\.k_proj\.weight, mtp\.layers\.0\.self_attn\.q_proj\.weight$",
        ),
        (
            lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(2, 1)}),
            r"unexpected tensors: lm_head\.weight_scale_inv$",
        ),
        (
            lambda t: t.update({f"{LM}layers.3.self_attn.o_proj.weight_scale_inv": torch.ones(2, 1)}),
            rf"{O_PROJ}_scale_inv has shape \[2, 1\], expected \[1, 1\]",
        ),
        (
            lambda t: t.update(
                {f"{LM}layers.3.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1, dtype=torch.float16)}
            ),
            rf"multipliers must be F32 or BF16: {O_PROJ}_scale_inv \(F16\)",
        ),
        (
            lambda t: to_plain(t, f"{LM}layers.3.self_attn.o_proj.weight"),
            rf"neither in 8 bits nor excluded by quantization_config: {O_PROJ}$",
        ),
        (
            lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].to(torch.float8_e4m3fn)}),
            r"must not be in 8 bits: mtp\.fc\.weight$",
        ),
        (
            lambda t: t.update(
                {
                    f"{LM}layers.0.linear_attn.in_proj_b.weight": t[f"{LM}layers.0.linear_attn.in_proj_b.weight"].to(
                        torch.float8_e4m3fn
                    )
                }
            ),
            r"must not be in 8 bits: model\.layers\.0\.linear_attn\.in_proj_b\.weight$",
        ),
        (
            lambda t: t.update(
                {
                    f"{LM}layers.3.self_attn.o_proj.weight": t[f"{LM}layers.3.self_attn.o_proj.weight"].to(
                        torch.float8_e5m2
                    )
                }
            ),
            rf"neither in 8 bits.*: {O_PROJ}",
        ),
        *(
            (lambda t, nan=nan: put(t, O_PROJ, nan), rf"{O_PROJ} or its multipliers hold values that aren't finite")
            for nan in (0x7F, 0xFF)
        ),
        *(
            (
                lambda t, value=value: t[f"{LM}layers.3.self_attn.o_proj.weight_scale_inv"].fill_(value),
                rf"{O_PROJ} or its multipliers hold values that aren't finite",
            )
            for value in (float("nan"), float("-inf"))
        ),
    ],
)
def test_checkpoint_defect_is_named(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(rewrite(small(tmp_path), change))


def put(tensors: dict[str, Tensor], name: str, code: int) -> None:
    """Set the code of the last value."""
    tensors[name.replace("model.", LM, 1)].view(torch.uint8)[-1, -1] = code


def to_plain(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].float()
    del tensors[f"{name}_scale_inv"]


def test_fp8_tensor_in_exclusion_list_is_refused(tmp_path: Path) -> None:
    directory = exclude(small(tmp_path), f"{LM}layers.3.self_attn.o_proj")
    with pytest.raises(CheckpointError, match=rf"in 8 bits although quantization_config excludes them: {O_PROJ}$"):
        load(directory)


def test_fp8_tensor_without_quantization_config_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    del raw["quantization_config"]
    path.write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError,
        match=r"config\.json has no quantization_config, but these are in 8 bits: model\.layers\.0\..*and \d+ more",
    ):
        load(tmp_path)


def test_quantization_config_without_fp8_tensors_is_refused(tmp_path: Path) -> None:
    listed = json.loads((small(tmp_path / "fp8") / "config.json").read_text())["quantization_config"]
    path = small(tmp_path / "plain", fp8=None) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": listed}))
    with pytest.raises(
        CheckpointError, match=r"neither in 8 bits nor excluded by quantization_config: model\.layers\.0"
    ):
        load(tmp_path / "plain")


def test_exclusion_does_not_match_longer_paths(tmp_path: Path) -> None:
    """`mlp.gate` is the router, which exclusion lists of dense models name although they have none; `in_proj_b` is a
    prefix of `in_proj_ba`."""
    directory = small(tmp_path)
    listed = json.loads((directory / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert f"{LM}layers.0.mlp.gate" in listed
    load(directory)
    with pytest.raises(CheckpointError, match=r"neither in 8 bits.*model\.layers\.0\.mlp\.gate_proj\.weight"):
        load(
            rewrite(
                directory, lambda t: [to_plain(t, f"{LM}layers.0.mlp.{part}_proj.weight") for part in ("gate", "up")]
            )
        )


def test_only_inconvertible_tensors_may_be_plain_if_unlisted(tmp_path: Path) -> None:
    directory = edit_list(small(tmp_path), lambda listed: [])
    load(directory)


@pytest.mark.parametrize(
    ("family", "options", "plain", "excluded", "message"),
    [
        (
            "dense",
            {},
            ("model.layers.3.self_attn.k_proj",),
            (),
            r"excludes model\.layers\.3\.self_attn\.k_proj\.weight but not .*q_proj.*v_proj",
        ),
        (
            "dense",
            {},
            ("mtp.layers.0.mlp.up_proj",),
            (),
            r"excludes mtp\.layers\.0\.mlp\.up_proj\.weight but not mtp\.layers\.0\.mlp\.gate_proj",
        ),
        (
            "dense",
            {},
            ("model.layers.0.linear_attn.in_proj_z",),
            (),
            r"in_proj_z\.weight but not model\.layers\.0\.linear_attn\.in_proj_qkv",
        ),
        (
            "moe",
            {"experts": "split"},
            ("model.layers.0.mlp.experts.5.up_proj",),
            (),
            r"experts\.5\.up_proj but not model\.layers\.0\.mlp\.experts\.0",
        ),
    ],
)
def test_exclusion_of_part_of_a_stacked_matrix_is_refused(
    family: Family,
    options: dict[str, Any],
    plain: tuple[str, ...],
    excluded: tuple[str, ...],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(exclude(small(tmp_path, family, plain=plain, **options), *excluded))


def test_fp8_packed_projections_are_refused(tmp_path: Path) -> None:
    directory = edit_list(
        small(tmp_path, "next"), lambda listed: [name for name in listed if not name.endswith("in_proj_qkvz")]
    )
    with pytest.raises(
        UnsupportedModelError, match=r"model\.layers\.0\.linear_attn\.in_proj_qkvz: packed projections in 8 bits"
    ):
        load(directory)


@pytest.mark.parametrize("name", ["ignored_layers", "modules_to_not_convert"])
@pytest.mark.parametrize("nested", [False, True])
def test_exclusion_list_is_read_from_all_supported_fields(name: str, nested: bool, tmp_path: Path) -> None:
    path = small(tmp_path, plain=("model.layers.1.mlp.down_proj",)) / "config.json"
    raw = json.loads(path.read_text())
    quantization = raw.pop("quantization_config")
    quantization[name] = quantization.pop("modules_to_not_convert")
    (raw["text_config"] if nested else raw)["quantization_config"] = quantization
    path.write_text(json.dumps(raw))
    config = load_text_config(tmp_path)
    assert isinstance(config.quantization, Fp8Blocks)
    assert "model.layers.1.mlp.down_proj" in config.quantization.excluded
    load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quantization_config: quant_method='bitsandbytes' is not supported \(only 'fp8', 'awq', "
            r"'compressed-tensors', 'gptq', 'modelopt'\)",
        ),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size=\[64, 128\]"),
        ({"weight_block_size": None}, r"weight_block_size=None"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        ({"modules_to_convert": ["model.embed_tokens"]}, r"modules_to_convert=\['model\.embed_tokens'\]"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of module names"),
    ],
)
def test_unsupported_quantization_field_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = small(tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"] |= fields
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        load_text_config(tmp_path)


def test_harmless_quantization_fields_are_accepted(tmp_path: Path) -> None:
    path = small(tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"] |= {
        "weight_per_tensor": False,
        "modules_to_convert": None,
        "scale_fmt": "float",
        "dequantize": False,
    }
    del raw["quantization_config"]["fmt"]
    path.write_text(json.dumps(raw))
    assert load_text_config(tmp_path).quantization is not None


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_random_weights_of_fp8_config(family: Family, tmp_path: Path, keeps_blocks: None) -> None:
    directory = small(tmp_path, family)
    config = load_text_config(directory)
    first, again, other = (random_parameters(config, device=CPU, dtype=torch.bfloat16, seed=seed) for seed in (1, 1, 2))
    loaded = load(directory)
    for name, weight in first.items():
        assert isinstance(weight, BlockScaled) == isinstance(loaded[name], BlockScaled), name
        assert weight.shape == loaded[name].shape, name
        assert torch.equal(weight.dequantize(), again[name].dequantize()), name
    name = "model.layers.0.mlp.experts.down_proj" if family == "moe" else "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(first[name].dequantize(), other[name].dequantize())
    assert 0.5 < first[name].dequantize().std() * first[name].shape[-1] ** 0.5 < 2
    model = load_model(directory, device=CPU, dtype=torch.float32, random_weights=True)
    assert logits(model)[..., : model.spec.num_real_tokens].isfinite().all()


def test_published_moe_has_expected_expert_tensors_and_block_rows() -> None:
    """35B-A3B: 40 layers of 256 experts with three projections each."""
    config = dataclasses.replace(
        published_config(2048, 40, (16, 2), 32, (256, 8, 512)), quantization=Fp8Blocks(excluded=frozenset())
    )
    layout = checkpoint_layout(
        config, {"model.layers.0.mlp.experts.0.up_proj.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"}
    )
    experts = [name for name in layout.sources if ".mlp.experts." in name and name.startswith("model.")]
    assert len(experts) == 30_720
    assert all(layout.sources[name].scheme is not None for name in experts)
    assert set(layout.block_rows.values()) == {128}
