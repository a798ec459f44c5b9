"""`agentspec quantize --to int4` and `--to mixed4`: what is stored how, from full precision and from FP8; the loaded
weights are exactly the dequantised files; memory doesn't grow with the checkpoint.

The files are dequantised here by the formats' definitions, nibble by nibble, without agentspec's code."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentspec.commands import cli
from agentspec.commands.quantize import quantize
from agentspec.engine import bundled
from agentspec.errors import CheckpointError
from agentspec.kernels import FourBit, Weight, quantize_blocks, quantize_int4, quantize_rows
from agentspec.models import shard_files
from agentspec.models.outline import quantized_as
from agentspec.models.quantised.recipes import RECIPES
from agentspec.models.quantization import is_convertible
from agentspec.models.registry import resolved_config
from agentspec.models.tensors import head_scheme, quantized_schemes
from agentspec.models.weights import Checkpoint
from tests.fakes.checkpoints import Family, Tensors, rewrite, write_checkpoint, write_tensors
from tests.fakes.four_bit import OF_FAMILY, SIZES
from tests.fakes.four_bit_layouts import LAYOUTS, TRUNK_MIXERS, TRUNK_MLP
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")
LM = "model.language_model."
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
CASES: list[tuple[Family, dict[str, Any]]] = [
    ("dense", {"dtype": torch.bfloat16}),
    ("dense", {"namespace": "flat", "tied": True, "sharded": True}),
    ("dense", {"mtp": False, "hidden_size": 160, "intermediate_size": 384}),
    ("dense", {"fp8": "stored", "sharded": True}),
    ("dense", {"fp8": "stored", "scale_dtype": torch.float32, "plain": ("model.layers.0.mlp.down_proj",)}),
    ("moe", {"dtype": torch.bfloat16, "control_dtype": torch.float32}),
    ("moe", {"experts": "fused", "mtp_experts": "fused", "moe_intermediate_size": 96}),
    ("moe", {"experts": "fused", "moe_intermediate_size": 48}),
    ("moe", {"experts": "fused", "mtp_experts": "fused", "fp8": "stored", "moe_intermediate_size": 96}),
    ("next", {"dtype": torch.bfloat16, "linear_num_value_heads": 8}),
]


def checkpoint(directory: Path, family: Family = "dense", **options: Any) -> Path:
    sizes = OF_FAMILY["moe" if family == "next" else family]
    return write_checkpoint(directory / "full", family, **SIZES | sizes | options)


def quantized(source: Path, target: str) -> Path:
    destination = source.with_name(f"{source.name}-{target}")
    assert cli.main(["quantize", str(source), str(destination), "--to", target]) == 0
    return destination


def load(directory: Path) -> dict[str, Weight]:
    with Checkpoint(directory) as files:
        return files.load(resolved_config(directory, random_weights=False), device=CPU, dtype=torch.float32)


def tensors_of(directory: Path) -> Tensors:
    return {
        name.replace(LM, "model."): tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if "visual" not in name
    }


def blocks(values: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, K] from 8-bit values and scales of 128 x 128, or of whole rows."""
    columns = values.shape[-1] if scales.shape[-1] == 1 else 128
    rows = 1 if scales.shape[-2] == values.shape[-2] else 128
    of_values = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return values.float() * of_values[..., : values.shape[-2], : values.shape[-1]]


def int4(tensors: Tensors, module: str) -> Tensor:
    words, scales = tensors.pop(f"{module}.weight_packed"), tensors.pop(f"{module}.weight_scale")
    assert (words.dtype, scales.dtype) == (torch.int32, torch.bfloat16)
    codes = torch.stack([words >> 4 * nibble & 15 for nibble in range(8)], -1).flatten(1)
    assert tensors.pop(f"{module}.weight_shape").tolist() == list(codes.shape)
    return (codes - 8).float() * scales.float().repeat_interleave(codes.shape[1] // scales.shape[1], 1)


def plain_values(directory: Path) -> Tensors:
    """Every tensor of a checkpoint in float32, in the flat namespace."""
    tensors, values = tensors_of(directory), {}
    for name in sorted(tensors):
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            values[f"{module}.weight"] = int4(tensors, module)
    for name, tensor in tensors.items():
        scale = next((f"{name}_{end}" for end in ("scale", "scale_inv") if f"{name}_{end}" in tensors), None)
        if not name.endswith(("_scale", "_scale_inv")):
            values[name] = tensor.float() if scale is None else blocks(tensor, tensors[scale])
    return values


def stacked(values: Tensors) -> Tensors:
    """The same values with experts in stacks."""
    found: Tensors = {}
    experts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, tensor in values.items():
        if (part := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)) is None:
            found[name] = tensor
        else:
            experts.setdefault((part[1], part[3]), {})[int(part[2])] = tensor
    whole = {key: torch.stack([of[expert] for expert in range(len(of))]) for key, of in experts.items()}
    for prefix, _ in whole:
        found |= {
            f"{prefix}.{stack}": torch.cat([whole[prefix, part] for part in parts], 1)
            for stack, parts in STACKS.items()
        }
    return found


def as_int4(values: Tensor) -> Tensor:
    """Rounded in the largest groups that divide the columns; as they are if there are none."""
    group = next((group for group in (128, 32) if values.shape[1] % group == 0), None)
    return values if group is None else quantize_int4(values, group).dequantize()


def rounded(target: str, name: str, values: Tensor, *, from_fp8: bool) -> Tensor:
    """What a parameter of the source should become."""
    module = name.removesuffix(".weight")
    if re.match(r"model\..*\.experts\.", name):
        return torch.stack([as_int4(expert) for expert in values])
    in_4_bits = TRUNK_MLP if target == "mixed4" else f"{TRUNK_MLP}|{TRUNK_MIXERS}"
    if re.fullmatch(in_4_bits, module):
        return as_int4(values)
    if target == "mixed4" and re.fullmatch(TRUNK_MIXERS, module):
        return values if from_fp8 else quantize_blocks(values).dequantize()
    if target == "mixed4" and name == "lm_head.weight":
        return quantize_rows(values).dequantize()
    is_expanded = from_fp8 and re.match(r"mtp\.layers\.0\.(self_attn\.._proj|mlp\.(experts|.*_proj))", name)
    return values.bfloat16().float() if is_expanded else values


@pytest.mark.parametrize("target", ["int4", "mixed4"])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_loaded_weights_are_the_dequantised_files_and_the_rounded_source(
    family: Family, options: dict[str, Any], target: str, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path, family, **options)
    written = quantized(source, target)
    in_file, before, after = stacked(plain_values(written)), stacked(plain_values(source)), load(written)
    if options.get("tied") and target == "mixed4":
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    assert before.keys() == in_file.keys()
    for name, values in in_file.items():
        want = rounded(target, name, before[name], from_fp8=options.get("fp8") == "stored")
        assert torch.equal(values, want), name
        assert (family == "next" and "in_proj" in name) or torch.equal(after[name].dequantize(), values), name
    in_4_bits = {name for name, weight in after.items() if isinstance(weight, FourBit)}
    narrow = {name for name, weight in after.items() if weight.shape[-1] % 32}
    assert {name for name in after if is_trunk(name, "mlp") and is_convertible(name)} - narrow <= in_4_bits
    assert all(is_trunk(name, "") for name in in_4_bits)
    assert any("_attn" in name for name in in_4_bits) == (target == "int4")


def is_trunk(name: str, room: str) -> bool:
    return re.match(rf"model\.layers\.\d+\.{room}", name) is not None


@pytest.mark.parametrize("target", ["int4", "mixed4"])
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_the_model_computes_with_these_values(family: Family, target: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, family, dtype=torch.bfloat16, namespace="flat")
    written = quantized(source, target)
    expanded = tmp_path / "expanded"
    expanded.mkdir()
    config = json.loads((written / "config.json").read_text())
    config.pop("quantization_config")
    (expanded / "config.json").write_text(json.dumps(config))
    write_tensors(expanded, plain_values(written))
    logits = []
    for directory in (written, expanded):
        model = load_model(directory, device=CPU, dtype=torch.float32)
        driver = Driver(model)
        hidden_NH = driver.prefill(list(range(20)))
        driver.mtp_prefill(list(range(20)), hidden_NH)
        window_NH = driver.verify([[3, 1, 4]], [2])[0]
        drafted_NH = driver.mtp([3, 1, 4], window_NH, 20)
        logits.append([model.logits(hidden_NH), model.logits(window_NH), model.draft_head(drafted_NH)])
    for mine, theirs in zip(*logits, strict=True):
        assert torch.equal(mine, theirs)


def test_layout_and_config_of_a_mixture(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "moe", dtype=torch.bfloat16, experts="fused", mtp_experts="fused")
    before, written = tensors_of(source), quantized(source, "mixed4")
    after = tensors_of(written)
    assert after["model.layers.1.mlp.experts.3.up_proj.weight_packed"].shape == (128, 16)
    assert after["model.layers.1.mlp.experts.3.up_proj.weight_scale"].shape == (128, 1)
    assert after["model.layers.0.linear_attn.in_proj_qkv.weight"].dtype == torch.float8_e4m3fn
    assert after["model.layers.0.linear_attn.in_proj_qkv.weight_scale"].shape == (2, 1)
    assert after["model.layers.1.self_attn.q_proj.weight_scale"].shape == (2, 1)
    assert after["lm_head.weight_scale"].shape == (160, 1)
    kept = before.keys() & after.keys() - {name for name in after if f"{name}_scale" in after}
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in kept)
    in_full = {"in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight"}
    assert {f"model.layers.0.linear_attn.{name}" for name in in_full} <= kept
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "mtp.fc.weight"} <= kept
    assert {"model.layers.0.mlp.shared_expert_gate.weight", "mtp.layers.0.mlp.experts.gate_up_proj"} <= kept
    raw = json.loads((source / "config.json").read_text())
    config = json.loads((written / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == raw
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "mixed-precision")
    formats = {group["format"]: group for group in quantization["config_groups"].values()}
    assert formats["pack-quantized"]["weights"]["group_size"] == 128
    assert r"re:.*\.layers\.\d+\.mlp\.experts\.\d+\.up_proj$" in formats["pack-quantized"]["targets"]
    assert {LM + "layers.0.mlp.gate", LM + "layers.0.linear_attn.in_proj_a", LM + "embed_tokens"} <= set(
        quantization["ignore"]
    )
    assert r"re:mtp\..*" in quantization["ignore"]
    assert len(json.dumps(quantization["config_groups"])) < 4000, "it must not grow with layers and experts"


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize("in_text_config", [False, True])
def test_a_tied_head_becomes_a_matrix_in_8_bits(
    family: Family, in_text_config: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path, family, dtype=torch.bfloat16, tied=True)
    raw = json.loads((source / "config.json").read_text())
    if in_text_config:
        raw["text_config"]["tie_word_embeddings"] = raw.pop("tie_word_embeddings")
        (source / "config.json").write_text(json.dumps(raw))
    written = quantized(source, "mixed4")
    said = capsys.readouterr().out
    before, after = tensors_of(source), tensors_of(written)
    embedding, head = before["model.embed_tokens.weight"], after["lm_head.weight"]
    assert after["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert torch.equal(after["model.embed_tokens.weight"], embedding)
    assert (head.dtype, head.shape) == (torch.float8_e4m3fn, embedding.shape)
    want = quantize_rows(embedding.float()).dequantize()
    assert torch.equal(blocks(head, after["lm_head.weight_scale"]), want)
    loaded = load(written)
    assert torch.equal(loaded["lm_head.weight"].dequantize(), want)
    assert torch.equal(loaded["model.embed_tokens.weight"].dequantize(), embedding.float())
    config = json.loads((written / "config.json").read_text())
    quantization = config.pop("quantization_config")
    expected = raw | {"tie_word_embeddings": False}
    if in_text_config:
        expected["text_config"] = raw["text_config"] | {"tie_word_embeddings": False}
    assert config == expected
    assert LM + "embed_tokens" in quantization["ignore"]
    assert re.search(r"^head +FP8 by row +0\.0 +0\.0 +\d\.\d\d%$", said, re.MULTILINE)
    assert (
        "note: the head has a matrix of its own now; the embedding, which was the head too, stays in bfloat16" in said
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", ["int4", "mixed4"])
def test_the_config_is_known_beforehand(target: str, tied: bool, tmp_path: Path) -> None:
    """Apart from where its quantization was read, and in which order that names the groups."""
    source = checkpoint(tmp_path, tied=tied)
    before, after = (resolved_config(path, random_weights=False) for path in (source, quantized(source, target)))
    known = quantized_as(before, target)
    assert known is not None
    assert replace(after, quantization=None) == replace(known, quantization=None)
    assert quantized_schemes(after) == quantized_schemes(known)
    assert after.tied == (tied and target != "mixed4")
    assert (head_scheme(after) is not None) == (target == "mixed4")


@pytest.mark.parametrize("target", ["fp8", "int4"])
def test_heads_in_full_precision_stay_tied(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path, tied=True)
    written = quantized(source, target)
    known = quantized_as(resolved_config(source, random_weights=False), target)
    assert known is not None
    assert known.tied
    assert "matrix of its own" not in capsys.readouterr().out
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in tensors_of(written)


def test_int4_alone_is_pack_quantized_with_the_head_in_full_precision(tmp_path: Path) -> None:
    written = quantized(checkpoint(tmp_path, dtype=torch.bfloat16), "int4")
    quantization = json.loads((written / "config.json").read_text())["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    assert "lm_head" in quantization["ignore"]
    assert tensors_of(written)["lm_head.weight"].dtype == torch.bfloat16


def test_fp8_tensors_of_the_source_are_taken_as_they_are(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, fp8="stored", scale_dtype=torch.float32)
    before, after = tensors_of(source), tensors_of(quantized(source, "mixed4"))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    assert torch.equal(before[f"{name}_scale_inv"], after[f"{name}_scale"].float())
    assert not [name for name in after if name.endswith("_scale_inv")]
    assert after["mtp.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_a_config_inside_the_text_config_is_replaced(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, fp8="stored")
    raw = json.loads((source / "config.json").read_text())
    raw["text_config"]["quantization_config"] = raw.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(raw))
    written = quantized(source, "mixed4")
    config = json.loads((written / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    assert load(written)


def test_columns_that_no_group_divides_stay_in_full_precision_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path, intermediate_size=150, dtype=torch.bfloat16)
    written = quantized(source, "mixed4")
    said = capsys.readouterr().out
    assert said.count("note: ") == 1
    assert "layers.0.mlp.down_proj and its like stay in full precision: their 150 columns" in said
    assert torch.equal(
        load(written)["model.layers.1.mlp.down_proj.weight"].dequantize(),
        load(source)["model.layers.1.mlp.down_proj.weight"].dequantize(),
    )


def test_a_checkpoint_without_whole_groups_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path, hidden_size=40, intermediate_size=40, head_dim=10, linear_value_head_dim=5)
    assert cli.main(["quantize", str(source), str(tmp_path / "out"), "--to", "int4"]) == cli.USER_ERROR
    assert "no matrix has columns in whole groups of 32" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_table_says_forms_bytes_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path, "moe", dtype=torch.bfloat16, fp8="stored", vision=False)
    written = quantized(source, "mixed4")
    lines = capsys.readouterr().out.splitlines()
    rows = {tuple(line.split("  ")[0].split()): re.split(r"  +", line.strip()) for line in lines[1:-1]}
    assert lines[0].split("  ")[0] == "part"
    assert rows["experts",][1] == "int4 in groups of 128"
    assert 8 < float(rows["experts",][4].removesuffix("%")) < 12
    assert rows["attention",][1::3] == ["FP8 in blocks of 128 x 128", "-"], "taken as it is, so without an error"
    assert rows["head",][1] == "FP8 by row"
    assert 1 < float(rows["head",][4].removesuffix("%")) < 4
    for column, directory in ((2, source), (3, written)):
        wanted = sum(tensor.nbytes for tensor in tensors_of(directory).values()) / 1e6
        assert f"{wanted:,.1f} MB" in lines[-1]
        assert abs(sum(float(row[column]) for row in rows.values()) - wanted) <= 0.05 * len(rows)


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "moe", dtype=torch.bfloat16)
    quantize(source, tmp_path / "first", "mixed4")
    quantize(source, tmp_path / "second", "mixed4")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(("family", "options"), [("dense", {}), ("moe", {"mtp_experts": "fused"})])
def test_fp8_files_have_the_bytes_of_the_plain_procedure(
    family: Family, options: dict[str, Any], tmp_path: Path
) -> None:
    """Each matrix rounded whole, every other tensor as it is, in the order of their names."""
    source = checkpoint(tmp_path, family, dtype=torch.bfloat16, hidden_size=160, **options)
    want: Tensors = {}
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        flat = name.replace(LM, "model.").removesuffix(".weight")
        prefix, _, kind = name.rpartition(".")
        if re.fullmatch(r"(model|mtp)\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj", flat):
            parts = {
                f"{prefix}.{expert}.{part}.weight": values
                for expert, stack in enumerate(tensor)
                for part, values in zip(STACKS[kind], stack.chunk(len(STACKS[kind])), strict=True)
            }
        elif re.fullmatch(f"{TRUNK_MLP}|{TRUNK_MIXERS}", flat.replace("mtp.", "model.")):
            parts = {name: tensor}
        else:
            want[name] = tensor
            continue
        for part, values in parts.items():
            weight = quantize_blocks(values)
            want[part], want[f"{part}_scale_inv"] = weight.values, weight.scales.bfloat16()
    save_file(want, tmp_path / "want", metadata={"format": "pt"})
    assert (quantized(source, "fp8") / "model.safetensors").read_bytes() == (tmp_path / "want").read_bytes()


def test_fp8_is_the_default(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    assert cli.main(["quantize", str(source), str(tmp_path / "default")]) == 0
    named = quantized(source, "fp8")
    for path in named.iterdir():
        assert path.read_bytes() == (tmp_path / "default" / path.name).read_bytes()


def test_the_flag_has_the_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tuple(RECIPES) == cli.QUANTIZE_TARGETS
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["quantize", "tiny-agent", str(tmp_path / "out"), "--to", "int3"])
    assert exit_info.value.code == cli.USER_ERROR
    said = capsys.readouterr().err
    assert "--to" in said
    assert "int3" in said
    assert all(target in said for target in RECIPES)
    assert not list(tmp_path.iterdir())


def test_quantised_sources_are_refused(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, official"].write(tmp_path)
    for target in RECIPES:
        with pytest.raises(CheckpointError, match="is quantised already"):
            quantize(stored, tmp_path / "out", target)
    with pytest.raises(CheckpointError, match="is in 8 bits already"):
        quantize(checkpoint(tmp_path, fp8="stored"), tmp_path / "out")


@pytest.mark.parametrize("name", ["model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_values_that_are_not_finite_are_named(name: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    rewrite(source, lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"{name}: holds values that aren't finite"):
        quantize(source, tmp_path / "out", "mixed4")
    assert not (tmp_path / "out").exists()


@contextmanager
def counted_memory() -> Iterator[list[int]]:
    """A list with the most bytes that tensors held at once, those before not counted."""
    held: dict[int, int] = {}
    most = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(tensor, Tensor) and not is_reading[0]:
                    count(tensor)
            return made

    def count(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in held and storage.nbytes():
            held[key] = storage.nbytes()
            weakref.finalize(storage, held.pop, key, None)
            most[0] = max(most[0], sum(held.values()))

    read, is_reading = Checkpoint.stored_tensor, [False]

    def stored_tensor(self: Checkpoint, *args: Any) -> Tensor:
        """A copy, as what is read may be the mapped file, which isn't held in memory."""
        is_reading[0] = True
        tensor = read(self, *args)
        is_reading[0] = False
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patch, Watch():  # type: ignore[no-untyped-call]
        patch.setattr(Checkpoint, "stored_tensor", stored_tensor)
        yield most


@pytest.mark.parametrize("target", ["fp8", "int4", "mixed4"])
def test_memory_is_bounded_by_the_largest_tensor(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as many layers, and a stack with three times as many experts, take the same memory."""
    limit = 200_000
    monkeypatch.setattr(shard_files, "SHARD_BYTES", limit)
    most, sizes = [], []
    for factor in (1, 3):
        layers = {"num_hidden_layers": 2 * factor, "layer_types": SIZES["layer_types"] * factor}
        source = checkpoint(tmp_path / str(factor), "moe", experts="fused", mtp=False, num_experts=8 * factor, **layers)
        with counted_memory() as peak:
            quantize(source, tmp_path / f"out-{factor}", target)
        most.append(peak[0])
        sizes.append(sum(tensor.nbytes for tensor in tensors_of(source).values()))
    assert sizes[1] > 6 * sizes[0]
    assert most[0] > 128 * 128 * 4, "the count must see tensors"
    # How full the current file is when the largest matrix comes differs a little.
    assert most[1] < 1.5 * most[0]
    assert most[1] < limit + 2_000_000 < sizes[1]


@pytest.mark.parametrize("target", ["int4", "mixed4"])
def test_the_bundled_model_still_calls_tools(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "tiny"
    assert cli.main(["quantize", bundled.NAME, str(directory), "--to", target]) == 0
    said = capsys.readouterr().out
    assert "22.0 MB before" in said
    assert ("matrix of its own" in said) == (target == "mixed4")
    workload = Path(__file__).parent.parent / "workloads" / "agentic.jsonl"
    flags = ["--sessions", "1", "--max-turns", "1", "--device", "cpu", "--quiet", "--json", str(tmp_path / "report")]
    assert cli.main(["replay", str(workload), "--model", str(directory), *flags]) == 0
    live = json.loads((tmp_path / "report").read_text())["live"]
    assert live["valid_calls"] == live["calls"] > 0
