"""The published form of the model: dtypes and JSON files of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from scripts.tiny_agent.architecture import config_json, generation_config
from scripts.tiny_agent.shards import write_shards


def published(name: str, weight: Tensor) -> Tensor:
    """In the dtype that Qwen3.5 publishes: bfloat16, but float32 for A_log and the recurrence's norm."""
    return weight.float() if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) else weight.bfloat16()


def write_checkpoint(
    out: Path, weights: dict[str, Tensor], text_config: dict[str, Any], *, end_of_text_id: int, end_of_turn_id: int
) -> None:
    """The config, the generation config and the weights, under the text-only names (the engine's canonical ones) and in
    the published dtypes."""
    for old in [*out.glob("model-*.safetensors"), *out.glob("model.safetensors*")]:
        old.unlink()
    _write_json(out / "config.json", config_json(text_config, end_of_text_id=end_of_text_id))
    _write_json(
        out / "generation_config.json", generation_config(end_of_turn_id=end_of_turn_id, end_of_text_id=end_of_text_id)
    )
    write_shards(out, {name: published(name, weight) for name, weight in weights.items()})


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
