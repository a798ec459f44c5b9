"""A mixture of experts made from the bundled model, so that a model with real output can be tested with a router:
sparse upcycling (arXiv 2212.05055).

The first rows of each FFN become the shared expert and the others every routed expert, each with its own noise, so that
the random router's choices matter. The model's output is similar to tiny-agent's, and its MTP head is right about as
often.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentspec.engine import bundled

NUM_EXPERTS, TOP_K = 8, 2
EXPERT_WIDTH = 256
"""Of tiny-agent's 640; the shared expert gets the rest."""


def write_upcycled(directory: Path, *, noise: float = 0.1, seed: int = 0) -> Path:
    """Write the checkpoint into `directory` (made if missing) and return it.

    noise: standard deviation of the differences between experts' weights, relative to that of the weights. Among some
    100,000 choices of experts, two summation orders differ in one, even in float32; the effect is proportional to the
    noise."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in bundled.DIRECTORY.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, directory)
    config = json.loads((bundled.DIRECTORY / "config.json").read_text())
    shared_width = config.pop("intermediate_size") - EXPERT_WIDTH
    config |= {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": shared_width,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for file in sorted(bundled.DIRECTORY.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            prefix, is_ffn, part = name.partition("mlp.")
            if not is_ffn:
                tensors[name] = tensor
                continue
            if part == "gate_proj.weight":
                hidden = tensor.shape[1]
                tensors[f"{prefix}mlp.gate.weight"] = (
                    torch.randn(NUM_EXPERTS, hidden, generator=generator) * hidden**-0.5
                ).to(tensor.dtype)
                # Its sigmoid is 0.5, and the down projection is doubled to compensate.
                tensors[f"{prefix}mlp.shared_expert_gate.weight"] = torch.zeros(1, hidden, dtype=tensor.dtype)
            is_down = part == "down_proj.weight"
            shared, routed = tensor.split([shared_width, EXPERT_WIDTH], 1 if is_down else 0)
            tensors[f"{prefix}mlp.shared_expert.{part}"] = (2 * shared if is_down else shared).contiguous()
            for expert in range(NUM_EXPERTS):
                noise = torch.randn(routed.shape, generator=generator) * routed.float().std() * noise
                tensors[f"{prefix}mlp.experts.{expert}.{part}"] = (routed + noise).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
