"""The checkpoint beside a config.json, by the headers of its safetensors files, against what the trainer's class
has.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.tools.engine_class.checkpoint_headers import read_headers
from harness.weights.findings import Finding, grouped
from harness.weights.tensor_view import TensorView

TABLE = re.compile(r"rotary_emb\.inv_freq")
"""Names of published checkpoints that are computed anew when a model is built."""
HEAD = re.compile(r"(^|\.)lm_head\.weight$")
MTP = re.compile(r"^mtp\.|\.mtp\.")
"""Names of layers for multi-token prediction, if these have no numbers behind the decoder's."""


@dataclass(frozen=True, kw_only=True)
class CheckpointBeside:
    """How the checkpoint in the folder of MODEL differs from what the trainer's class has."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def compare_checkpoint(
    folder: Path, layout: Sequence[TensorView], ignored: Collection[str] = ()
) -> CheckpointBeside | None:
    """Return how a folder's checkpoint differs from the trainer's tensors; None if it has no checkpoint in safetensors.

    layout: the trainer's tensors, as transformers' class would load and save them. ignored: patterns of names that this
    class leaves out when it loads. Raise ConfigError for a file that cannot be read.
    """
    stored = read_headers(folder)
    if not stored:
        return None
    sent = {view.name: view for view in layout}
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    others = [name for name in stored if name not in sent]
    left_out = passed_over(others, fields, ignored)
    findings = [Finding(kind="not stored", tensor=name) for name in sent if name not in stored]
    casts: list[Finding] = []
    for name in (each for each in sent if each in stored):
        view, found = sent[name], stored[name]
        dtype = str(view.dtype).removeprefix("torch.")
        if found.shape is not None and found.shape != view.shape:
            counts: dict[str, Any] = {"stored": list(found.shape), "shape": list(view.shape)}
            findings.append(Finding(kind="stored in another shape", tensor=name, counts=counts))
        elif found.dtype not in ("", dtype):
            one_byte = view.dtype.itemsize == 1 or "8" in found.dtype
            other = Finding(kind="stored in another dtype", tensor=name, counts={"stored": found.dtype, "sent": dtype})
            (findings if one_byte else casts).append(other)
    findings += [Finding(kind="not sent", tensor=name) for name in others if name not in left_out]
    known = sum(each.shape is not None for each in stored.values())
    notes = [
        f"the checkpoint beside config.json: {len(stored):,} names compared, {known:,} of them with dtype and shape"
    ]
    alone = grouped(Finding(kind="named", tensor=name) for name in left_out)
    notes += [f"in the checkpoint alone, as no trainer here has it: {line}" for line in alone]
    notes += [f"converted when the trainer loads it: {line}" for line in grouped(casts)]
    return CheckpointBeside(findings=tuple(findings), notes=tuple(notes))


def passed_over(names: Iterable[str], fields: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, str]:
    """Return those names that published checkpoints have and no trainer here, and what they are.

    fields: of config.json. ignored: patterns of names that transformers' class leaves out when it loads.
    """
    unused = re.compile("|".join(ignored) or "(?!)")
    is_tied = {**fields, **(fields.get("text_config") or {})}.get("tie_word_embeddings") is True
    found = {}
    for name in names:
        if TABLE.search(name):
            found[name] = "a table that is computed anew"
        elif is_of_mtp_layer(name, fields):
            found[name] = "of a layer for multi-token prediction, which only a draft model reads"
        elif unused.search(name):
            found[name] = "transformers' class leaves it out when it loads"
        elif is_tied and HEAD.search(name):
            found[name] = (
                "config.json ties it to the embedding, which the engine takes; a head of its own would be lost"
            )
    return found


def is_of_mtp_layer(name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether a name is of a layer for multi-token prediction: those are numbered on behind the decoder's.

    fields: of config.json, which says how many there are.
    """
    language = fields.get("text_config") or fields
    layers, more = (int(language.get(f"num_{which}_layers") or 0) for which in ("hidden", "nextn_predict"))
    found = re.search(r"\.layers\.(\d+)\.", name)
    return bool(MTP.search(name) or (found and layers <= int(found[1]) < layers + more))
