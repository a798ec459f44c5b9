"""How a loaded model's weights are stored, in words: the form of each part, and the bytes that a token reads.

Knows names and forms; computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentspec import kernels
from agentspec.models.hf_config import TextConfig

PARTS = (
    ("vision", re.compile(r"(model\.)?visual\..*")),
    ("MTP head", re.compile(r"mtp\..*")),
    ("embedding", re.compile(r"model\.embed_tokens\..*")),
    ("head", re.compile(r"lm_head\..*")),
    ("experts", re.compile(r".*\.mlp\.experts\..*")),
    ("shared experts", re.compile(r".*\.mlp\.shared_expert\..*")),
    ("FFN", re.compile(r".*\.mlp\.(gate|up|down)_proj\..*")),
    ("attention", re.compile(r".*\.self_attn\.[qkvo]_proj\..*")),
    ("recurrence", re.compile(r".*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\..*")),
    ("the rest", re.compile(r".*")),
)
"""Parts of a model and the canonical names of their tensors; the first that matches."""


def describe(config: TextConfig, parameters: Mapping[str, kernels.Weight], notes: Sequence[str] = ()) -> str:
    """The form of each part, its bytes, the bytes that a token reads, and the notes: for people, on one line."""
    read = sum(_read_bytes(config, part_of(name), weight.nbytes) for name, weight in parameters.items())
    by_form: dict[str, dict[str, int]] = {}
    for (part, form), num_bytes in sizes(parameters).items():
        by_form.setdefault(form, {})[part] = num_bytes
    forms = []
    for form, parts in sorted(by_form.items(), key=lambda entry: -sum(entry[1].values())):
        forms.append(f"{form}: {', '.join(parts)} ({_size(sum(parts.values()))})")
    return "; ".join([*forms, f"a token reads {_size(read)}", *notes])


def sizes(parameters: Mapping[str, kernels.Weight]) -> dict[tuple[str, str], int]:
    """Bytes in memory by part (one of PARTS) and form, in words."""
    found: dict[tuple[str, str], int] = {}
    for name, weight in parameters.items():
        key = part_of(name), weight.form_name
        found[key] = found.get(key, 0) + weight.nbytes
    return found


def place(key: tuple[str, str]) -> tuple[int, str]:
    """Sorts parts and forms as tables for people have them. key: as in `sizes`."""
    part, form = key
    return [name for name, _ in PARTS].index(part), form


def part_of(name: str) -> str:
    """One of PARTS, for a tensor's canonical name."""
    return next(part for part, pattern in PARTS if pattern.fullmatch(name))


def _read_bytes(config: TextConfig, part: str, num_bytes: int) -> int:
    """What a token reads without drafts: of the experts those that it chooses, of the embedding one row."""
    if part == "MTP head" or (part == "embedding" and not config.tied):
        return 0
    if part == "experts" and config.moe is not None:
        return num_bytes * config.moe.top_k // config.moe.num_experts
    return num_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
