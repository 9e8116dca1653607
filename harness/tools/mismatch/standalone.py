"""A program without this package that shows the difference, from program.py.jinja."""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.schema import Config
from harness.inputs import Inputs
from harness.observer import RunContext
from harness.rollout import sglang_api
from harness.rollout.defaults import engine_defaults
from harness.runtime import redact
from harness.runtime.cpu_standins import STANDINS
from harness.tools.export.program import templates
from harness.tools.mismatch.answer import Answer
from harness.tools.mismatch.search import SENT, WEIGHTS
from harness.tools.mismatch.sources import engine_changes, trainer_changes
from harness.weights.log_probs import FLOOR

ROWS = 8
"""How many sequences the program has."""
Row = tuple[list[int], int]
"""Token ids of a prompt and its response, and how many of them are the response."""


def standalone_program(run: RunContext, inputs: Inputs, answer: Answer, rows: Sequence[Row]) -> str:
    """Return the text of a program that needs sglang and transformers alone. Its second arm is without the source."""
    config, device = run.config, run.world.device_type
    found = arm(config, device, inputs.attention)
    values = {
        "sentence": answer.sentence().replace('"""', "'''").replace("\\", "/"),
        "versions": f"sglang {sglang_api.probe().version}",
        "folder": str(run.folder),
        "rows": [ids for ids, _ in rows[:ROWS]],
        "responses": [count for _, count in rows[:ROWS]],
        "found": found,
        "control": control_arm(config, device, inputs.attention, answer.source),
        "floor": FLOOR[config.model.dtype],
        "cuda": device == "cuda",
        "group": config.parallel.tp * config.parallel.pp,
        "is_mla": "kv_lora_rank" in _fields(inputs.model_folder),
        "stand_in_names": runpy.run_path(str(STANDINS / "sgl_kernel" / "__init__.py"))["NAMES"],
    }
    return redact.text(templates(Path(__file__).parent).get_template("program.py.jinja").render(values))


def arm(config: Config, device: Any, attention: str, dtype: str = "") -> dict[str, Any]:
    """Return what one arm of the program gives to sglang.Engine and to transformers."""
    arguments = {
        **engine_defaults(device, config.engine.preset),
        "device": device,
        "dtype": config.model.dtype,
        "tp_size": config.parallel.tp,
        "pp_size": config.parallel.pp,
        "skip_tokenizer_init": True,
        **config.engine.args,
    }
    arguments.pop("enable_memory_saver", None)
    plain = attention.removeprefix("packed_")
    return {
        "weights": WEIGHTS if config.model.rollout_precision == "same" else SENT,
        "engine": arguments,
        "trainer": {"dtype": dtype or config.model.dtype, "attention": plain},
    }


def control_arm(config: Config, device: Any, attention: str, source: str) -> Mapping[str, Any] | None:
    """Return the arm without the source; None if the source is no setting of the engine or the trainer."""
    for change in engine_changes(config):
        if change.name == source:
            return arm(change.config, device, attention)
    for each in trainer_changes(config, attention):
        if each.name == source and not each.head:
            other = attention if each.attention == "same" else each.attention
            return arm(config, device, other, "" if each.dtype == "same" else each.dtype)
    return None


def _fields(folder: Path) -> str:
    file = folder / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""
