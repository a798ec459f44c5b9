"""Weights in few bits: which parameters may be, what a config's `quantization_config` asks for, how files and memory
hold them.

Owns names, JSON and the translation from what a file holds to a form of the kernels (`kernels.Weight`). The numbers are
the kernels', the files `weights.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError

SCALE_SUFFIX = "_scale_inv"
"""Behind a tensor's name: its multipliers (in spite of the name)."""

_CONVERTIBLE = re.compile(
    r"(model|mtp)\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj\.weight"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight"
    r"|mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj\.weight"
    r"|mlp\.experts\.(gate_up|down)_proj)"
)
_LISTS = ("modules_to_not_convert", "ignored_layers")
QUANTIZATION_FIELDS: dict[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""What a `quantization_config` says besides the list of exclusions."""
_DEFAULTS = {"fmt": "e4m3", "activation_scheme": "dynamic"}
"""What the format's definition in transformers takes where a config says nothing."""
_HARMLESS: dict[str, object] = {"dequantize": True, "scale_fmt": "float", "expert_dtype": "fp8"}
"""Fields of transformers with a value that says what we do anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A tensor that a checkpoint must hold beside the values of a quantised one."""

    suffix: str
    """Behind the name of the values."""
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Any of these, as safetensors calls them."""


class Quantization(Protocol):
    """How a checkpoint holds every linear that may be converted and isn't excluded, and the form that it gets in
    memory."""

    dtype: ClassVar[str]
    """Of the values, as safetensors calls it."""

    @property
    def excluded(self) -> frozenset[str]:
        """Modules in full precision: whole dotted paths in canonical names. Some name nothing that exists; a path never
        stands for another one that it begins (`mlp.gate` isn't `mlp.gate_proj`)."""
        ...

    def beside(self, shape: tuple[int, ...]) -> tuple[Beside, ...]:
        """What stands beside values of this shape."""
        ...

    def read(self, name: str, tensor: Callable[[str], Tensor]) -> kernels.Weight:
        """The weight `name`, on the CPU. tensor: reads one by its name."""
        ...

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        """Room for a parameter [O, K] or [X, O, K]. block_rows: divides the first row of each part that will be
        filled."""
        ...

    def quantize(self, values: Tensor) -> kernels.Weight:
        """The nearest weight, as `read` would give it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Blocks:
    """The official form, a Quantization: float8_e4m3fn with one multiplier for each block of 128 x 128."""

    dtype: ClassVar[str] = "F8_E4M3"

    excluded: frozenset[str]

    def beside(self, shape: tuple[int, ...]) -> tuple[Beside, ...]:
        return (Beside(suffix=SCALE_SUFFIX, shape=kernels.scales_shape(shape), dtypes=("F32", "BF16")),)

    def read(self, name: str, tensor: Callable[[str], Tensor]) -> kernels.Weight:
        return kernels.BlockScaled(values=tensor(name), scales=tensor(name + SCALE_SUFFIX).float())

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        return empty_fp8(shape, device=device, dtype=dtype, block_rows=block_rows)

    def quantize(self, values: Tensor) -> kernels.Weight:
        return kernels.quantize_blocks(values)


def keeps_blocks(device: torch.device) -> bool:
    """Whether weights stay in 8 bits on the device. Not on the CPU: each product would expand them again."""
    return device.type != "cpu"


def empty_fp8(
    shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int = kernels.SCALE_BLOCK
) -> kernels.Weight:
    """Room for a weight in 8 bits: block-scaled, or plain in `dtype` where the device doesn't keep blocks."""
    if keeps_blocks(device):
        return kernels.BlockScaled.empty(shape, device=device, block_rows=block_rows)
    return kernels.Plain(torch.empty(shape, dtype=dtype, device=device))


def canonical_name(name: str) -> str:
    """A tensor's or module's name in the namespace of text-only checkpoints: `model.language_model.` is `model.`."""
    return re.sub(r"^model\.language_model\.", "model.", name)


def is_convertible(name: str) -> bool:
    """Whether a parameter, by canonical name or by that of one expert's part, may be in 8-bit floats.

    Never: norms, what steers the recurrence (A_log, dt_bias, conv1d, in_proj_a, in_proj_b), router and shared gate,
    embeddings, lm_head, mtp.fc, and Qwen3-Next's packed projections, where rows of different parts would share a
    multiplier."""
    return _CONVERTIBLE.fullmatch(name) is not None


def parse_quantization(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> Fp8Blocks | None:
    """What the config (`raw`) or its text part says, None where it says nothing. Raises UnsupportedModelError naming
    field and value."""
    found = set()
    for label, holder in (("quantization_config", raw), ("text_config.quantization_config", text)):
        quantization = holder.get("quantization_config")
        if quantization is None:
            continue
        if not isinstance(quantization, Mapping):
            raise CheckpointError(f"{where}: {label} must be an object")
        found.add(_parse(quantization, f"{where}: {label}"))
    if len(found) > 1:
        raise CheckpointError(f"{where}: quantization_config and text_config.quantization_config differ")
    return found.pop() if found else None


def _parse(quantization: Mapping[str, Any], where: str) -> Fp8Blocks:
    for name, supported in QUANTIZATION_FIELDS.items():
        value = quantization.get(name, _DEFAULTS.get(name))
        if value != supported:
            raise UnsupportedModelError(f"{where}: {name}={value!r} is not supported (only {supported!r})")
    for name, value in quantization.items():
        if name not in QUANTIZATION_FIELDS and name not in _LISTS and value and value != _HARMLESS.get(name):
            raise UnsupportedModelError(f"{where}: {name}={value!r} is not supported")
    excluded: set[str] = set()
    for name in _LISTS:
        modules = quantization.get(name) or []
        if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
            raise CheckpointError(f"{where}: {name} must be a list of module names")
        excluded.update(map(canonical_name, modules))
    return Fp8Blocks(excluded=frozenset(excluded))
