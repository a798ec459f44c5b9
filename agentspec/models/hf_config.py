"""Reads a Hugging Face `config.json` of the Qwen3.5 family into a frozen TextConfig.

Owns where each field may be (wrapper or flat, old and new names) and which values are refused. Knows nothing about
tensors: names, shapes and bytes are derived from a TextConfig in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentspec.errors import CheckpointError, UnsupportedModelError, cut_repr
from agentspec.files import is_there, read_object
from agentspec.models.quantised.parse import FILE, parse_quantization
from agentspec.models.quantization import Quantization

LayerType = Literal["linear_attention", "full_attention"]
GateType = Literal["silu", "sigmoid"]

CONV_TAPS = 4
"""Taps of the causal convolution; the state stores the last CONV_TAPS - 1 rows."""

MAX_VOCAB, MAX_POSITIONS, MAX_LAYERS, MAX_EXPERTS, MAX_WIDTH, MAX_HEADS = 2**24, 2**22, 1024, 2**13, 2**20, 2**12
"""Largest accepted values, each several times that of the largest published model. A larger number is a mistake, and
would be allocated."""

_DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
_MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "linear_conv_kernel_dim": (CONV_TAPS,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("silu", "swish", "sigmoid"),
    "mtp_use_dedicated_embeddings": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "mtp_num_hidden_layers": (0, 1),
    "num_nextn_predict_layers": (0, 1),
}
"""Fields of which only these values are implemented. An absent field is accepted."""
_LEAST = 1e-30
"""Smallest accepted value of fields that must be above 0: smaller ones are 0 in float32, or nearly so."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN context extension (arXiv 2309.00071), as configured by `rope_type: yarn`."""

    factor: float
    original_max_position: int
    """Context length of the training."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin; None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the ramp's ends to whole dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Sizes and routing of the mixture-of-experts FFNs."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    normalize_top_k: bool
    """Divide the chosen experts' probabilities by their sum."""
    first_expert: int | None = None
    """Of those that a rank holds, where ranks hold whole experts (shards.py); None: it holds all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """The text model of a checkpoint, with all defaults resolved."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    rms_norm_eps: float
    max_position: int
    tied: bool
    """The head reuses the embedding; the checkpoint has no lm_head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    """Number of leading dimensions of each head that are rotated. Also the divisor in the frequencies' exponent."""
    yarn: Yarn | None

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Per head."""
    value_dim: int
    """Per head."""
    output_gate: GateType
    """Activation of z in the gated norm after the recurrence."""

    intermediate_size: int | None
    """Dense FFN; None in MoE models, where every FFN is a mixture."""
    moe: MoeConfig | None

    num_mtp_layers: int | None
    """0 or 1. None: not in the config; decided by the checkpoint's tensors."""
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    """None: every parameter is a plain tensor."""

    @property
    def packed_projections(self) -> bool:
        """Qwen3-Next packs q, k, v, z (and b, a) per key head in one tensor."""
        return self.model_type == "qwen3_next"

    @property
    def conv_channels(self) -> int:
        """Channels of [q | k | v] before the recurrence."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def max_context(self) -> int:
        """Tokens, prompt and output together."""
        if self.yarn is None:
            return self.max_position
        return max(self.max_position, int(self.yarn.original_max_position * self.yarn.factor))

    @property
    def has_mtp(self) -> bool:
        assert self.num_mtp_layers is not None, "num_mtp_layers is unresolved"
        return self.num_mtp_layers > 0

    def with_mtp_layers(self, num: int) -> TextConfig:
        return replace(self, num_mtp_layers=num)


class _Fields:
    """Typed access to one JSON object. Errors name the field and the value."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def _present(self, name: str) -> Any:
        value = self.raw.get(name)
        if value is None:
            raise CheckpointError(f"{self.where}: field {name!r} is missing")
        return value

    def _wrong(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name}={cut_repr(self.raw[name])}: must be {expected}")

    def integer(self, name: str, default: int | None = None, *, most: int = MAX_WIDTH) -> int:
        if default is not None and self.raw.get(name) is None:
            return default
        value = self._present(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._wrong(name, f"a positive integer up to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, most: float = 1e6) -> float:
        """A finite positive number; JSON can contain NaN and Infinity."""
        if default is not None and self.raw.get(name) is None:
            return default
        value = self._present(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _LEAST <= value <= most:
            raise self._wrong(name, f"a positive number up to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def only(self, name: str, allowed: tuple[object, ...]) -> None:
        """Refuse a value that isn't implemented. An absent field is accepted."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{self.where}: {name}={cut_repr(value)} is not supported (only {', '.join(map(repr, allowed))})"
            )


def load_text_config(directory: Path) -> TextConfig:
    """Parse `directory/config.json`. Raises CheckpointError, or UnsupportedModelError that names the unsupported
    value."""
    path, beside = directory / "config.json", directory / FILE
    return parse_text_config(
        read_object(path), where=str(path), quantization=read_object(beside) if is_there(beside) else None
    )


def parse_text_config(
    raw: Mapping[str, Any], *, where: str = "config.json", quantization: Mapping[str, Any] | None = None
) -> TextConfig:
    """TextConfig from a wrapper (with `text_config` inside) or a flat config.

    quantization: the content of hf_quant_config.json, if there is one."""
    outer_type = raw.get("model_type")
    if outer_type not in _DENSE_TYPES + _MOE_TYPES:
        raise UnsupportedModelError(
            f"{where}: model_type={cut_repr(outer_type)} is not supported (only {', '.join(_DENSE_TYPES + _MOE_TYPES)})"
        )
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config must be an object")
    model_type = text.get("model_type", outer_type)
    if model_type not in _DENSE_TYPES + _MOE_TYPES or (model_type in _MOE_TYPES) != (outer_type in _MOE_TYPES):
        raise UnsupportedModelError(
            f"{where}: text_config.model_type={cut_repr(model_type)} inside {outer_type!r} is not supported"
        )
    fields = _Fields(text, where)
    for name, allowed in _SUPPORTED_VALUES.items():
        fields.only(name, allowed)
    top = _Fields(raw, where)
    num_heads, num_kv_heads, num_key_heads, num_value_heads = (
        fields.integer(name, most=MAX_HEADS)
        for name in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    )
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    if num_value_heads % num_key_heads:
        raise CheckpointError(
            f"{where}: linear_num_value_heads={num_value_heads} is no multiple of linear_num_key_heads={num_key_heads}"
        )
    head_dim = fields.integer("head_dim", most=MAX_HEADS)
    theta, rotary_dim, yarn = _rope(fields, head_dim)
    is_moe = model_type in _MOE_TYPES
    return TextConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size", most=MAX_VOCAB),
        hidden_size=fields.integer("hidden_size"),
        layer_types=_layer_types(fields),
        rms_norm_eps=fields.number("rms_norm_eps", most=1.0),
        max_position=fields.integer("max_position_embeddings", most=MAX_POSITIONS),
        tied=top.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rotary_dim=rotary_dim,
        yarn=yarn,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", most=MAX_HEADS),
        value_dim=fields.integer("linear_value_head_dim", most=MAX_HEADS),
        output_gate="sigmoid" if text.get("output_gate_type") == "sigmoid" else "silu",
        intermediate_size=None if is_moe else fields.integer("intermediate_size"),
        moe=_moe(fields) if is_moe else None,
        num_mtp_layers=_num_mtp_layers(fields),
        eos_token_ids=tuple(
            dict.fromkeys(token_ids(raw, "eos_token_id", where) + token_ids(text, "eos_token_id", where))
        ),
        quantization=parse_quantization(raw, text, where, quantization),
    )


def token_ids(raw: Mapping[str, Any], name: str, where: str) -> list[int]:
    """A field that contains an id, a list of ids, or nothing."""
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise CheckpointError(f"{where}: {name}={cut_repr(value)}: must be a token id or a list of them")
    return ids


def _num_mtp_layers(fields: _Fields) -> int | None:
    stated = (fields.raw.get(name) for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    return next((int(value) for value in stated if value is not None), None)


def _layer_types(fields: _Fields) -> tuple[LayerType, ...]:
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    types = fields.raw.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", 4)
        return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"{fields.where}: layer_types must list {num_layers} layers (num_hidden_layers)")
    for i, layer_type in enumerate(types):
        if layer_type not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(f"{fields.where}: layer_types[{i}]={cut_repr(layer_type)} is not supported")
    return tuple(types)


def _rope(fields: _Fields, head_dim: int) -> tuple[float, int, Yarn | None]:
    """(theta, rotary dimensions, YaRN) from `rope_parameters`, or from `rope_scaling` and top-level fields."""
    nested = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{fields.where}: rope_parameters must be an object")
    outer = {name: fields.raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields.raw}
    rope = _Fields({**outer, **nested}, f"{fields.where}: rope_parameters")
    rope_type = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if rope_type not in ("default", "mrope", "yarn"):
        raise UnsupportedModelError(
            f"{fields.where}: rope_type={cut_repr(rope_type)} is not supported (only default and yarn)"
        )
    unknown = sorted(set(rope.raw) - _ROPE_KEYS - (_YARN_KEYS if rope_type == "yarn" else set()))
    if unknown:
        raise UnsupportedModelError(
            f"{fields.where}: rope_parameters of type {rope_type!r} has unsupported fields: {', '.join(unknown)}"
        )
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 0.25))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor gives {rotary_dim} rotary dimensions of head_dim={head_dim}"
        )
    yarn = None
    if rope_type == "yarn":
        yarn = Yarn(
            factor=rope.number("factor"),
            original_max_position=rope.integer("original_max_position_embeddings", most=MAX_POSITIONS),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=None if rope.raw.get("attention_factor") is None else rope.number("attention_factor"),
            truncate=rope.flag("truncate", True),
        )
        if yarn.original_max_position * yarn.factor > MAX_POSITIONS:
            raise rope._wrong("factor", f"at most {MAX_POSITIONS} / original_max_position_embeddings")
    return rope.number("rope_theta", most=1e12), rotary_dim, yarn


def _moe(fields: _Fields) -> MoeConfig:
    moe = MoeConfig(
        num_experts=fields.integer("num_experts", most=MAX_EXPERTS),
        top_k=fields.integer("num_experts_per_tok", most=MAX_EXPERTS),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        normalize_top_k=fields.flag("norm_topk_prob", True),
    )
    if moe.top_k > moe.num_experts:
        raise CheckpointError(f"{fields.where}: num_experts_per_tok={moe.top_k} exceeds num_experts={moe.num_experts}")
    return moe
