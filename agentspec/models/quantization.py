"""Quantised weights: which parameters may be quantised, what a format has to say, and the family's official format.

Owns names, JSON, and the conversion from a file's tensors to a form of the kernels (`kernels.Weight`). The arithmetic
is in the kernels, file access in `weights.py`, other formats in `quantised/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError, UnsupportedModelError

SCALE_SUFFIX = "_scale_inv"
"""Appended to a tensor's name for its multipliers (in spite of "inv")."""

ReadTensor = Callable[[str, kernels.Region], Tensor]
"""Reads a region of a tensor by its name; () is all of it."""

_CONVERTIBLE = re.compile(
    r"(model|mtp)\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj\.weight"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight"
    r"|mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj\.weight"
    r"|mlp\.experts\.(gate_up|down)_proj)"
)
_EXPERT_MODULE = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate_proj|up_proj|down_proj)")
_BLOCK = kernels.SCALE_BLOCK
_LISTS = ("modules_to_not_convert", "ignored_layers")
QUANTIZATION_FIELDS: dict[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""Fields of a `quantization_config` besides the list of exclusions."""
_DEFAULTS = {"fmt": "e4m3", "activation_scheme": "dynamic"}
"""Defaults of the format's definition in transformers."""
_HARMLESS: dict[str, object] = {"dequantize": True, "scale_fmt": "float", "expert_dtype": "fp8"}
"""Fields of transformers with a value that changes nothing here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that a quantised weight consists of."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of these."""
    dtypes: tuple[str, ...]
    """Any of these, by their safetensors names."""
    what: str = "multipliers"
    """In the plural, for errors."""
    is_optional: bool = False
    """Whether it may be missing. Nothing reads it then but `complaint`."""
    complaint: Callable[[Tensor], str | None] | None = None
    """Says what is wrong with the values of a tensor that has only one right content; None: nothing."""


class Scheme(Protocol):
    """How a quantised weight is stored, and its form in memory."""

    dtype: ClassVar[str]
    """Of the values, by its safetensors name."""
    bits: ClassVar[int]
    """Of a value."""

    @property
    def column_block(self) -> int:
        """Columns that share a multiplier. Ranks never split them; they may split the rows of a block."""

    @property
    def has_part_blocks(self) -> bool:
        """Whether the last block of a row may have fewer columns."""

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """The tensors of the weight `name`, by their names; one with the weight's own name has its values. Raises
        UnsupportedModelError for shapes that the format can't store."""

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        """The same scheme with what only the file's header says of the weight `name`. dtype: of a tensor."""

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        """A region of the weight `name`, on the CPU; reads nothing else than its values and multipliers. region: slices
        alone; columns begin where those that share a multiplier do."""

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        """An uninitialised parameter [O, K] or [X, O, K]. block_rows: a divisor of the first row of each part that will
        be filled."""

    def quantize(self, values: Tensor) -> kernels.Weight:
        """The nearest weight, in the form that `read` returns."""

    def for_head(self) -> Scheme | None:
        """The scheme of a head that is stored so, in a form that GPUs multiply; None: it is expanded while loading."""

    def cpu_only(self, name: str, shape: tuple[int, ...]) -> str | None:
        """What it is of the parameter `name`, as a plural, that no GPU kernel takes so far; None: GPUs take it."""


class Quantization(Protocol):
    """What a config says of the quantisation of each module."""

    @property
    def column_block(self) -> int:
        """A multiple of what each scheme has."""

    @property
    def is_official(self) -> bool:
        """Whether it is the family's own format. Only in other ones may weights be quantised in the files that are
        plain in memory, such as the head."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the checkpoint is served."""

    def scheme(self, module: str) -> Scheme | None:
        """How a module is stored if it can be quantised, by its canonical name (`canonical_name`), which may be that of
        an expert's part; None: in full precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Blocks:
    """The official format, a Quantization with itself as its only Scheme: float8_e4m3fn with one multiplier for each
    block of 128 x 128."""

    dtype: ClassVar[str] = "F8_E4M3"
    bits: ClassVar[int] = 8
    column_block: ClassVar[int] = kernels.SCALE_BLOCK
    has_part_blocks: ClassVar[bool] = True
    is_official: ClassVar[bool] = True
    notes: ClassVar[tuple[str, ...]] = ()

    excluded: frozenset[str]
    """Modules in full precision, as whole dotted paths in canonical names. Some may not exist. A path doesn't exclude
    longer paths that start with it (`mlp.gate` isn't `mlp.gate_proj`), except those of the experts in a stack."""

    def scheme(self, module: str) -> Scheme | None:
        expert = _EXPERT_MODULE.fullmatch(module)
        paths = {module}
        if expert is not None:
            stack, part = expert.groups()
            paths |= {stack, f"{stack}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"}
        return None if paths & self.excluded else self

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        return block_tensors(name, SCALE_SUFFIX, shape)

    def as_stored(self, name: str, dtype: Callable[[str], str]) -> Scheme:
        return self

    def read(self, name: str, tensor: ReadTensor, region: kernels.Region = ()) -> kernels.Weight:
        return read_blocks(name, SCALE_SUFFIX, tensor, region)

    def empty(
        self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int
    ) -> kernels.Weight:
        return empty_fp8(shape, device=device, dtype=dtype, block_rows=block_rows)

    def quantize(self, values: Tensor) -> kernels.Weight:
        return kernels.quantize_blocks(values)

    def for_head(self) -> Scheme | None:
        return None

    def cpu_only(self, name: str, shape: tuple[int, ...]) -> str | None:
        return None


def block_tensors(name: str, suffix: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    """Scheme.tensors of float8_e4m3fn in blocks of 128 x 128. suffix: appended to the name for the multipliers."""
    return {
        name: StoredTensor(shapes=(shape,), dtypes=("F8_E4M3",), what="values"),
        name + suffix: StoredTensor(shapes=(kernels.scales_shape(shape),), dtypes=("F32", "BF16")),
    }


def read_blocks(name: str, suffix: str, tensor: ReadTensor, region: kernels.Region) -> kernels.Weight:
    """Scheme.read of `block_tensors`."""
    values = tensor(name, region)
    num_stacked = values.ndim - 2
    ends = [index for index in region[num_stacked:] if isinstance(index, slice)]
    blocks = (slice((at.start or 0) // _BLOCK, None if at.stop is None else -(-at.stop // _BLOCK)) for at in ends)
    scales = tensor(name + suffix, (*region[:num_stacked], *blocks)).float()
    inside = (ends[0].start or 0) % _BLOCK if ends else 0
    block_rows = math.gcd(_BLOCK, inside)
    if inside:
        # The rows begin inside a block: in smaller blocks they begin one.
        first, num_blocks = inside // block_rows, -(-values.shape[-2] // block_rows)
        scales = scales.repeat_interleave(_BLOCK // block_rows, -2)[..., first : first + num_blocks, :].contiguous()
    return kernels.BlockScaled(values=values, scales=scales, block_rows=block_rows)


def keeps_blocks(device: torch.device) -> bool:
    """Whether weights stay in 8 bits on the device. Not on the CPU, where each product would have to expand them
    again."""
    return device.type != "cpu"


def empty_fp8(
    shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int = kernels.SCALE_BLOCK
) -> kernels.Weight:
    """An uninitialised 8-bit weight: block-scaled, or plain in `dtype` where the device doesn't keep blocks."""
    if keeps_blocks(device):
        return kernels.BlockScaled.empty(shape, device=device, block_rows=block_rows)
    return kernels.Plain(torch.empty(shape, dtype=dtype, device=device))


def canonical_name(name: str) -> str:
    """The name of a tensor or module in text-only checkpoints: `model.language_model.` becomes `model.`."""
    return re.sub(r"^model\.language_model\.", "model.", name)


def is_convertible(name: str) -> bool:
    """Whether a parameter, by canonical name or by that of one expert's part, may be quantised in memory.

    Never: norms, the recurrence's control tensors (A_log, dt_bias, conv1d, in_proj_a, in_proj_b), router and shared
    gate, embeddings, lm_head, mtp.fc, and Qwen3-Next's packed projections, where rows of different parts would share a
    multiplier."""
    return _CONVERTIBLE.fullmatch(name) is not None


def parse_fp8(quantization: Mapping[str, Any], where: str) -> Fp8Blocks:
    """The official format. Raises CheckpointError, or UnsupportedModelError that names field and value."""
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
