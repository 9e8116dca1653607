"""Run by test_exported_names.py in a process of its own: exports of one model, each given to the engine's loaders.

Usage: python exported_names_of.py MODEL_FOLDER. Prints JSON: export -> its lists, causes and exit code. A model with a
quantization_config is sent in four bits, as GPTQ or AWQ has them.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.tools.full_size.command import prepare_import
from harness.tools.full_size.exported_names import read_export
from harness.tools.full_size.model_and_options import Options, read_question

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
    return {
        "right": sent,
        "with a table": {**sent, "model.layers.0.self_attn.rotary_emb.inv_freq": ["float32", [8]]},
        "prefix": {f"module.{name}": each for name, each in sent.items()},
        "no q_norm": without(sent, "q_norm"),
        "an expert of one rank lost": without(sent, r"layers\.1\.mlp\.experts\.7\."),
        "gate and up fused": {
            **without(sent, r"experts\.\d+\.(gate|up)_proj"),
            **reshaped(
                renamed({n: e for n, e in sent.items() if "experts" in n and "gate_proj" in n}, "gate", "gate_up"),
                "",
                2,
            ),
        },
        "half a shard": reshaped(sent, "o_proj", 0.5),
        "counted from the stage": renamed(sent, r"layers\.1\.", "layers.3."),
        "AWQ": renamed(sent, r"_proj\.weight", "_proj.qweight"),
        "no head": without(sent, "lm_head"),
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
    """Return exports with shapes, and indexes whose files are absent."""
    lost = without(sent, r"layers\.1\.self_attn\.k_proj\.scales")
    return {
        "shapes": {"sent": sent},
        "index": {"weight_map": dict.fromkeys(sent, "absent.safetensors")},
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


if __name__ == "__main__":
    model = Path(sys.argv[1])
    prepare_import(model)
    import torch

    from harness.tools.engine_class import meta_model
    from harness.tools.full_size.model_verdict import find_answer
    from harness.tools.full_size.trainer_names import trainer_layout

    meta_model.import_all(model)
    quantized = json.loads((model / "config.json").read_text()).get("quantization_config")
    with tempfile.TemporaryDirectory() as plain:
        views = trainer_layout(without_quantization(model, Path(plain)), torch.bfloat16)
    right = {view.name: [str(view.dtype).removeprefix("torch."), list(view.shape)] for view in views}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "sent.json"
        if quantized:
            every = exports_in_four_bits(in_four_bits(right, quantized["quant_method"]))
            answers = {name: found(model, file, export, dtype="float16") for name, export in every.items()}
        else:
            answers = {name: found(model, file, {"sent": sent}, ep=2) for name, sent in exports(right).items()}
    print(json.dumps(answers))
