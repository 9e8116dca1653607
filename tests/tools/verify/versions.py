"""Two versions of a tiny checkpoint: the older one that a server starts with, and the newer one that a sender sends."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.task.tiny_models import save_tiny_model
from tests.end_to_end.newer_models import COMMON, save_newer_model

Make = Callable[[Path], Path]
GEMMA = COMMON | {"hidden_size": 256, "tie_word_embeddings": True, "sliding_window": 64}


def _tiny(name: str, dtype: str, **overrides: Any) -> Make:
    return lambda folder: save_tiny_model(name, folder, 0, dtype, overrides=overrides, texts=["12 + 7 = 19"] * 4)


def _gemma(folder: Path) -> Path:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


# Without gpt_oss: SGLang refuses it with the only attention backend that runs on a CPU.
MODELS: dict[str, Make] = {
    "qwen2": _tiny("qwen2", "float32"),
    "llama": _tiny("llama", "bfloat16"),
    "qwen3_tied": _tiny("qwen3", "bfloat16", tie_word_embeddings=True),
    "gemma3": _gemma,
    "qwen3_moe": _tiny("qwen3_moe", "float32", moe_intermediate_size=48),  # SGLang's CPU mode makes 64 of it
    "deepseek_v3": _tiny("deepseek_v3", "bfloat16"),
    "glm4_moe": partial(save_newer_model, "glm4_moe"),
}


def make_versions(name: str, folder: Path) -> tuple[Path, Path]:
    """Make one of MODELS, and return two folders: its older version and its newer one.

    No tensor of either is constant, and none is the same in both.
    """
    made = MODELS[name](folder / "made")
    return moved_copy(made, folder / "was", 0), moved_copy(made, folder / "new", 1)


def moved_copy(folder: Path, to: Path, seed: int) -> Path:
    """Copy a checkpoint with normal(0, 0.1) added to each tensor, in the tensor's dtype; return the copy's folder."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(seed)
    for file in to.glob("*.safetensors"):
        moved = {
            name: (each + torch.randn(each.shape, generator=generator) * 0.1).to(each.dtype)
            for name, each in load_file(file).items()
        }
        save_file(moved, file, metadata={"format": "pt"})
    return to


def is_tied(folder: Path) -> bool:
    """Whether the checkpoint's head is its embedding."""
    return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"))
