"""Checkpoints in 4 bits as published tools write them, with the plain values that they stand for; written without
agentspec's own code.

Codes, scales and zero points are random, so that every nibble, order and sign counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.checkpoints import Family, Tensors, write_checkpoint, write_tensors

Writer = Callable[[torch.Generator, str, Tensor], tuple[Tensors, Tensor]]
"""(random numbers, module, a matrix of the size that the values should have) -> (the module's tensors by their names,
the values that they stand for, float32)."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 128,
    "linear_num_value_heads": 8,
    "vocab_size": 160,
}
"""Every matrix has whole groups of 128 columns; one layer of each kind."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    "dense": {"intermediate_size": 256},
    "moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "experts": "split",
    },
}


def as_words(nibbles: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [..., W] from [..., 8 W]: nibble j of word w has entry 8 w + order[j]."""
    eights = torch.nn.functional.pad(nibbles.long(), (0, -nibbles.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = sum((eights[..., entry] << 4 * j for j, entry in enumerate(order)), torch.tensor(0))
    return words.to(torch.int32)


def as_bytes(codes: Tensor) -> Tensor:
    """uint8 [N, K / 2]: the even column in the low nibble."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def random_int4(
    generator: torch.Generator, like: Tensor, group: int, dtype: torch.dtype, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [N, K], zero points [N, G], scales [N, G], values [N, K])."""
    num_rows, depth = like.shape
    codes = torch.randint(0, 16, (num_rows, depth), generator=generator)
    zeros = torch.full((num_rows, depth // group), 8)
    if not symmetric:
        zeros = torch.randint(0, 16, zeros.shape, generator=generator)
    scales = ((torch.rand(zeros.shape, generator=generator) + 0.5) * float(like.float().std()) / 5).to(dtype)
    differences = codes - zeros.repeat_interleave(group, 1)
    return codes, zeros, scales, differences.float() * scales.float().repeat_interleave(group, 1)


def e2m1_values(codes: Tensor) -> Tensor:
    exponent, fraction = (codes >> 1 & 3).float(), (codes & 1).float()
    magnitude = torch.where(exponent == 0, fraction / 2, 2 ** (exponent - 1) * (1 + fraction / 2))
    return torch.where(codes >= 8, -magnitude, magnitude)


def gptq(group: int, *, symmetric: bool = True, version: int = 1, dtype: torch.dtype = torch.float16) -> Writer:
    def write(generator: torch.Generator, module: str, like: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, values = random_int4(generator, like, group, dtype, symmetric=symmetric)
        stored_zeros = (zeros - 1) % 16 if version == 1 else zeros
        return {
            f"{module}.qweight": as_words(codes).t(),
            f"{module}.qzeros": as_words(stored_zeros.t()),
            f"{module}.scales": scales.t(),
            f"{module}.g_idx": torch.arange(like.shape[1], dtype=torch.int32) // group,
        }, values

    return write


def awq(group: int) -> Writer:
    def write(generator: torch.Generator, module: str, like: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, values = random_int4(generator, like, group, torch.float16, symmetric=False)
        return {
            f"{module}.qweight": as_words(codes.t(), AWQ_ORDER),
            f"{module}.qzeros": as_words(zeros.t(), AWQ_ORDER),
            f"{module}.scales": scales.t(),
        }, values

    return write


def pack_quantized(group: int, *, symmetric: bool = True) -> Writer:
    def write(generator: torch.Generator, module: str, like: Tensor) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, values = random_int4(generator, like, group, torch.bfloat16, symmetric=symmetric)
        tensors = {
            f"{module}.weight_packed": as_words(codes),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(like.shape),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = as_words(zeros.t()).t()
        return tensors, values

    return write


def nvfp4(producer: str, *, inputs: bool) -> Writer:
    """producer: "compressed-tensors" or "modelopt". inputs: also multipliers of 4-bit inputs."""

    def write(generator: torch.Generator, module: str, like: Tensor) -> tuple[Tensors, Tensor]:
        num_rows, depth = like.shape
        codes = torch.randint(0, 16, (num_rows, depth), generator=generator)
        scales = (torch.rand((num_rows, depth // 16), generator=generator) * 440 + 2).to(torch.float8_e4m3fn)
        spread = 1 + torch.rand((), generator=generator)
        of_tensor = (float(like.float().std()) * spread / 700).float()
        if producer == "modelopt":
            tensors = {
                f"{module}.weight": as_bytes(codes),
                f"{module}.weight_scale": scales,
                f"{module}.weight_scale_2": of_tensor,
            }
            tensors |= {f"{module}.input_scale": torch.tensor(0.01)} if inputs else {}
        else:
            divisor = (1 / of_tensor).reshape(1)
            of_tensor = 1 / divisor
            tensors = {
                f"{module}.weight_packed": as_bytes(codes),
                f"{module}.weight_scale": scales,
                f"{module}.weight_global_scale": divisor,
            }
            tensors |= {f"{module}.input_global_scale": torch.tensor([300.0])} if inputs else {}
        return tensors, e2m1_values(codes) * scales.float().repeat_interleave(16, 1) * of_tensor

    return write


def fp8(strategy: str, *, dtype: torch.dtype = torch.float32, shape: str = "column", inputs: bool = False) -> Writer:
    """strategy: "tensor", "channel" or "block". shape: of a row's multipliers, "column" [N, 1] or "vector" [N]."""

    def write(generator: torch.Generator, module: str, like: Tensor) -> tuple[Tensors, Tensor]:
        num_rows, depth = like.shape
        sizes = {"tensor": (1, 1), "channel": (num_rows, 1), "block": (-(-num_rows // 128), -(-depth // 128))}
        scales = (torch.rand(sizes[strategy], generator=generator) + 0.5) * float(like.float().std()) / 200
        scales = scales.to(dtype)
        block = {"tensor": num_rows, "channel": 1, "block": 128}[strategy]
        of_values = scales.float().repeat_interleave(block, 0)[:num_rows]
        of_values = of_values.repeat_interleave(128 if strategy == "block" else depth, 1)[:, :depth]
        values = (torch.randn(like.shape, generator=generator) * 200).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if strategy == "tensor" else scales.flatten() if shape == "vector" else scales
        tensors = {f"{module}.weight": values, f"{module}.weight_scale": stored}
        tensors |= {f"{module}.input_scale": torch.tensor(0.02)} if inputs else {}
        return tensors, values.float() * of_values

    return write


def write_quantized(
    directory: Path,
    family: Family,
    writers: Mapping[str, Writer],
    config: Mapping[str, Any] | None,
    *,
    beside: Mapping[str, Any] | None = None,
    extra: Tensors | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Path, Path]:
    """Write a checkpoint whose modules are quantised, and one with their values in float32. Returns both directories.

    writers: by expressions that match whole names of modules in the flat namespace; the first one counts. config: the
    `quantization_config`. beside: the content of hf_quant_config.json. extra: more tensors of the first checkpoint."""
    stored, expanded = directory / "stored", directory / "expanded"
    write_checkpoint(expanded, family, seed=seed, **SIZES | OF_FAMILY[family] | options)
    plain = load_file(expanded / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1000)
    packed: Tensors = {}
    for name in sorted(plain):
        module = name.removesuffix(".weight")
        flat = re.sub(r"^model\.language_model\.", "model.", module)
        writer = next((writer for pattern, writer in writers.items() if re.fullmatch(pattern, flat)), None)
        if writer is None or plain[name].ndim != 2:
            packed[name] = plain[name]
        else:
            tensors, plain[name] = writer(generator, module, plain[name])
            packed |= tensors
    write_tensors(expanded, plain)
    stored.mkdir()
    whole = json.loads((expanded / "config.json").read_text())
    whole |= {} if config is None else {"quantization_config": config}
    (stored / "config.json").write_text(json.dumps(whole))
    if beside is not None:
        (stored / "hf_quant_config.json").write_text(json.dumps(beside))
    write_tensors(stored, packed | (extra or {}))
    return stored, expanded


def edit_quantization(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Apply `change` to the `quantization_config` of a checkpoint."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    change(raw["quantization_config"])
    path.write_text(json.dumps(raw))
    return directory
