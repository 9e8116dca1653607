"""A tiny DeepSeek-V3 whose MTP layer guesses every greedy token, so that a draft model with other weights shows at
once.

Attention and experts write zeros: the next token depends on the last one alone. The MTP layer is the same model again,
so SGLang accepts all of its drafts.
"""

import json
from pathlib import Path
from typing import Any

ONE_LAYER = {"num_nextn_predict_layers": 1}
ENGINE_ARGUMENTS = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}
"""One draft at a time, as the CPU's stand-ins can serve it."""


def is_of_mtp_layer(name: str) -> bool:
    """Return whether a checkpoint name of the tiny model belongs to its MTP layer, which follows two decoder layers."""
    return name.startswith("model.layers.2.")


def make_predictable(folder: Path) -> dict[str, Any]:
    """Turn a saved tiny DeepSeek-V3 into the predictable one, with its MTP layer; return the tensors that were
    written.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    from harness.task.tiny_models import add_mtp_layer

    (fields := json.loads((folder / "config.json").read_text())).update(ONE_LAYER)
    (folder / "config.json").write_text(json.dumps(fields))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if not any(map(is_of_mtp_layer, tensors)):
        add_mtp_layer(file, AutoConfig.from_pretrained(str(folder), trust_remote_code=False), seed=0)
        tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    layer, head = "model.layers.2", tensors["lm_head.weight"]
    head *= 10  # sharp, so that sampled tokens are mostly the likeliest ones
    hidden = head.shape[1]
    tensors[f"{layer}.shared_head.head.weight"] = head.clone()
    tensors[f"{layer}.eh_proj.weight"] = torch.eye(hidden, 2 * hidden, dtype=head.dtype)
    tensors[f"{layer}.enorm.weight"] = torch.ones(hidden, dtype=head.dtype)
    tensors[f"{layer}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return dict(tensors)


def forget_mtp_layer(folder: Path) -> None:
    """Overwrite what the MTP layer joins its inputs with by zeros: its drafts are then no better than chance."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.eh_proj.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
