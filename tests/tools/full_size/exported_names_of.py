"""Exports of one model, each given to the engine's loaders: `answers`, in a fork of its own (forks.py)."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness.tools.full_size.exported_names import read_export
from harness.tools.full_size.model_and_options import Options, read_question
from harness.tools.full_size.model_verdict import find_answer
from harness.tools.full_size.trainer_names import trainer_layout
from tests.tools.full_size.asked import imported

Sent = dict[str, list[Any]]


def without(sent: Sent, part: str) -> Sent:
    return {name: each for name, each in sent.items() if not re.search(part, name)}


def renamed(sent: Sent, old: str, new: str) -> Sent:
    return {re.sub(old, new, name): each for name, each in sent.items()}


def reshaped(sent: Sent, part: str, rows: float) -> Sent:
    return {
        name: [dtype, [int(shape[0] * rows), *shape[1:]]] if re.search(part, name) else [dtype, shape]
        for name, (dtype, shape) in sent.items()
    }


def exports(sent: Sent) -> dict[str, Sent]:
    gates = {name: each for name, each in sent.items() if "experts" in name and "gate_proj" in name}
    fused = reshaped(renamed(gates, "gate", "gate_up"), "", 2)
    return {
        "right, with a table": {**sent, "model.layers.0.self_attn.rotary_emb.inv_freq": ["float32", [8]]},
        "prefix": {f"module.{name}": each for name, each in sent.items()},
        "some lost, others halved": reshaped(
            without(sent, r"q_norm|lm_head|layers\.1\.mlp\.experts\.7\."), "o_proj", 0.5
        ),
        "other names": renamed(
            without(sent, r"experts\.\d+\.(gate|up)_proj"), r"attn(.*)_proj\.weight", r"attn\1_proj.qweight"
        )
        | fused,
        "counted from the stage": renamed(sent, r"layers\.1\.", "layers.3."),
    }


def in_four_bits(sent: Sent, method: str) -> Sent:
    """Return the names, dtypes and shapes of a checkpoint in GPTQ or AWQ with groups of 128."""
    found: Sent = {}
    for name, (_, shape) in sent.items():
        if not re.search(r"layers.*_proj\.weight", name):
            found[name] = ["float16", shape]
            continue
        rows, columns = shape
        packed = [columns // 8, rows] if method == "gptq" else [columns, rows // 8]
        parts = {
            "qweight": ["int32", packed],
            "qzeros": ["int32", [columns // 128, rows // 8]],
            "scales": ["float16", [columns // 128, rows]],
        } | ({"g_idx": ["int32", [columns]]} if method == "gptq" else {})
        found |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    return found


def exports_in_four_bits(sent: Sent) -> dict[str, Any]:
    """Return an export with shapes, and an index whose files are absent."""
    lost = without(sent, r"layers\.1\.self_attn\.k_proj\.scales")
    return {
        "shapes": {"sent": sent},
        "index without scales of k": {"weight_map": dict.fromkeys(lost, "absent.safetensors")},
    }


def found(folder: Path, file: Path, export: dict[str, Any], **options_of: Any) -> dict[str, Any]:
    file.write_text(json.dumps(export))
    options = Options(tp=2, names=str(file), **options_of)
    question = read_question(str(folder), options, (), file.parent)
    answer = find_answer(folder.name, options, question, read_export(options.names), 0.0, 0.0)
    return {"code": answer.code, **answer.table()["names"]}


def without_quantization(folder: Path, to: Path) -> Path:
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(fields))
    return to


def right_names(folder: str) -> Sent:
    """Return what transformers' class saves without quantization: name -> dtype and shape."""
    with tempfile.TemporaryDirectory() as plain:
        views = trainer_layout(without_quantization(imported(folder), Path(plain)), torch.bfloat16)
    return {view.name: [str(view.dtype).removeprefix("torch."), list(view.shape)] for view in views}


def answers(folder: str) -> dict[str, dict[str, Any]]:
    """Return export -> its lists, causes and exit code. A model with a quantization_config is sent in four bits, as
    GPTQ or AWQ has them."""
    model, right = Path(folder), right_names(folder)
    quantized = json.loads((model / "config.json").read_text()).get("quantization_config")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "sent.json"
        if not quantized:
            return {name: found(model, file, {"sent": sent}, ep=2) for name, sent in exports(right).items()}
        every = exports_in_four_bits(in_four_bits(right, quantized["quant_method"]))
        return {name: found(model, file, export, dtype="float16") for name, export in every.items()}
