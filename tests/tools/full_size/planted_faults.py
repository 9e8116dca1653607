"""Run by test_full_size.py in a process of its own: faults in what is sent, each given to the ranks of one engine.

Usage: python planted_faults.py MODEL_FOLDER. DeepSeek-V3's real widths with six layers, tp 4, ep 2, and its draft model.
Prints JSON: fault -> what was found.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from harness.rollout.cpu_mode import cpu_environment
from harness.rollout.sglang_api import meta_model
from harness.runtime import cpu_standins

Views = list["TensorView"]


def without(part: str) -> Callable[[Views], Views]:
    return lambda views: [view for view in views if part not in view.name]


def renamed(old: str, new: str) -> Callable[[Views], Views]:
    return lambda views: [replace(view, name=view.name.replace(old, new)) for view in views]


def transposed(part: str) -> Callable[[Views], Views]:
    return lambda views: [
        replace(view, shape=view.shape[::-1], stride=view.stride[::-1]) if part in view.name else view for view in views
    ]


def sent_as_float32(part: str) -> Callable[[Views], Views]:
    return lambda views: [replace(view, dtype=torch.float32) if part in view.name else view for view in views]


def shorter(part: str) -> Callable[[Views], Views]:
    return lambda views: [
        replace(view, shape=(view.shape[0] - 64, *view.shape[1:])) if part in view.name else view for view in views
    ]


FAULTS: dict[str, Callable[[Views], Views]] = {
    "none": lambda views: views,
    "half a fused pair": without("layers.4.self_attn.kv_a_proj_with_mqa.weight"),
    "an expert's name": renamed("layers.5.mlp.experts.77.up_proj.weight", "layers.5.mlp.experts.77.up_porj.weight"),
    "transposed expert": transposed("layers.3.mlp.experts.200.down_proj.weight"),
    "no correction bias": without("layers.4.mlp.gate.e_score_correction_bias"),
    "vocabulary cut": shorter("embed_tokens"),
    "an expert lost": without("layers.4.mlp.experts.255."),
    "a dtype": sent_as_float32("layers.2.input_layernorm"),
    "a layer lost": without("layers.5."),
    "no head": without("lm_head"),
}
DRAFT_FAULTS: dict[str, Callable[[Views], Views]] = {
    "draft: none": lambda views: views,
    "draft: MTP layer lost": lambda views: [],
    "draft: an MTP name": renamed("layers.6.eh_proj", "layers.6.eh_porj"),
    "draft: MTP layer numbered from zero": renamed("layers.6.", "layers.0."),
    "draft: half a fused pair": without("layers.6.self_attn.kv_a_proj_with_mqa.weight"),
    "draft: an expert lost": without("layers.6.mlp.experts.255."),
}


def engine(folder: Path) -> "EngineShape":
    arguments = {"tp_size": 4, "ep_size": 2, "dtype": "bfloat16", "speculative_algorithm": "NEXTN"}
    return EngineShape(folder=folder, arguments=arguments, tp=4, pp=1, processes=2)


def found(views: Sequence["TensorView"], all_ranks: bool = False) -> list[str]:
    """Return the problems of one engine with these tensors."""
    findings = Findings.of(examine(engine(folder), fusing_groups(views), all_ranks))
    assert not findings.padding
    return list(findings.problems)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cpu_standins.activate()
    os.environ.update(cpu_environment(1))
    meta_model.prepare_import(folder, draft=True)
    import torch

    from harness.tools.full_size.draft_model import examine_draft, mtp_layout
    from harness.tools.full_size.engine_ranks import EngineShape, examine
    from harness.tools.full_size.findings import Findings
    from harness.tools.full_size.trainer_names import trainer_layout
    from harness.weights.fusing import fusing_groups
    from harness.weights.tensor_view import TensorView

    meta_model.import_all(folder)
    layout = list(trainer_layout(folder, torch.bfloat16))
    answers = {name: found(plant(layout)) for name, plant in FAULTS.items()}
    answers["an expert's name, all ranks"] = found(FAULTS["an expert's name"](layout), all_ranks=True)
    mtp, target = list(mtp_layout(folder, layout)), examine(engine(folder), fusing_groups(layout), all_ranks=False)
    for name, plant in DRAFT_FAULTS.items():
        draft = examine_draft(engine(folder), target, layout, plant(mtp))
        answers[name] = list(draft.findings.problems)
        assert not draft.filled_by_trainer
    print(json.dumps(answers))
