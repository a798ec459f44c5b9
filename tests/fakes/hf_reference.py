"""What transformers computes for a checkpoint directory: hidden states, logits and the MTP head's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

_MTP_NAMES = {
    "mtp.fc.": "layers.0.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
    "mtp.norm.": "layers.0.post_norm.",
    "mtp.layers.0.": "layers.0.mtp_block.",
}


@dataclass(frozen=True)
class Reference:
    """All [N, ...] for N tokens; MTP rows pair token t+1 with hidden t, so they are N-1."""

    hidden: Tensor
    logits: Tensor
    mtp_hidden: Tensor
    mtp_logits: Tensor


def load_transformers(directory: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The published class of the checkpoint (the multimodal one for wrappers)."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model_class = getattr(transformers, config.architectures[0])
    model, info = model_class.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    return model.eval()


@torch.no_grad()
def compute_reference(directory: Path, tokens: Sequence[int]) -> Reference:
    """The checkpoint's experts under `mtp.` must be fused: transformers' MTP model takes that form."""
    model = load_transformers(directory)
    hidden = model.model(input_ids=torch.tensor([tokens])).last_hidden_state
    logits = model.lm_head(hidden)
    mtp = _load_mtp(model, directory)
    positions = torch.arange(1, len(tokens))
    mtp_hidden = mtp.forward_layer(0, hidden[:, :-1], positions[None], None, input_ids=torch.tensor([tokens[1:]]))
    return Reference(
        hidden=hidden[0], logits=logits[0], mtp_hidden=mtp_hidden[0], mtp_logits=model.lm_head(mtp_hidden)[0]
    )


def _load_mtp(model: transformers.PreTrainedModel, directory: Path) -> MtpModel:
    text = model.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel(model, 1).float().eval()
    wanted = {name for name in mtp.state_dict() if name.startswith("layers.")}
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        for prefix, renamed in _MTP_NAMES.items():
            if name.startswith(prefix):
                tensors[renamed + name.removeprefix(prefix)] = tensor.float()
    assert set(tensors) == wanted, set(tensors) ^ wanted
    mtp.load_state_dict(tensors, strict=False)
    return mtp
