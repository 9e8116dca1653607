"""A program without this package that shows the difference, from program.py.jinja."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.schema import Config
from harness.inputs import Inputs
from harness.observer import RunContext
from harness.rollout import sglang_api
from harness.rollout.engine_settings import engine_defaults, without_models_code
from harness.runtime import redact
from harness.tools.export.program import printable, stand_in_names, templates
from harness.tools.mismatch.answer import IN_DECODING, Answer, Source
from harness.tools.mismatch.baseline import SENT, WEIGHTS
from harness.tools.mismatch.serving import Serving
from harness.tools.mismatch.sources import PRECISION, engine_changes, trainer_changes
from harness.weights.log_probs import FLOOR

ROWS = 8
"""How many sequences the program has."""
Row = tuple[list[int], int]
"""Token ids of a prompt and its response, and how many of them are the response."""


def standalone_program(run: RunContext, inputs: Inputs, answer: Answer, rows: Sequence[Row], serving: Serving) -> str:
    """Return the text of a program that needs sglang and transformers alone. Its second arm is without the source."""
    config, device = run.config, run.world.device_type
    found = arm(config, device, inputs.attention)
    values = {
        "sentence": printable(redact.text(answer.sentence())).replace('"""', "'''").replace("\\", "/"),
        "versions": f"sglang {sglang_api.probe().version}",
        "folder": str(run.folder),
        "rows": [ids for ids, _ in rows[:ROWS]],
        "responses": [count for _, count in rows[:ROWS]],
        "found": redact.values(found),
        "control": redact.values(
            control_arm(config, serving, inputs.attention, answer.largest if answer.is_setting else None)
        ),
        "floor": FLOOR[config.model.dtype],
        "cuda": device == "cuda",
        "group": config.parallel.tp * config.parallel.pp,
        "is_mla": "kv_lora_rank" in _fields(inputs.model_folder),
        "fp8": config.model.precision.is_quantized,
        "stand_in_names": stand_in_names(),
    }
    return templates(Path(__file__).parent).get_template("program.py.jinja").render(values)


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
    arguments = without_models_code(arguments)
    arguments.pop("enable_memory_saver", None)
    # The program scores given tokens, for which SGLang asks no draft model; the CPU would need more stand-ins for one.
    arguments = {name: value for name, value in arguments.items() if not name.startswith("speculative_")}
    plain = attention.removeprefix("packed_")
    return {
        "weights": SENT if config.model.precision.is_quantized else WEIGHTS,
        "engine": arguments,
        "trainer": {"dtype": dtype or config.model.dtype, "attention": plain},
    }


def control_arm(config: Config, serving: Serving, attention: str, source: Source | None) -> Mapping[str, Any] | None:
    """Return the arm without the source; None if the source is no setting that sglang.Engine or transformers has."""
    wanted = (source.name, source.how.removesuffix(IN_DECODING)) if source else None
    for change in engine_changes(config, serving):
        if (change.name, change.how) == wanted:
            return arm(change.config, serving.device, attention, config.model.dtype)
    if source and source.name == PRECISION:
        return arm(replace(config, model=replace(config.model, dtype="float32")), serving.device, attention)
    for each in trainer_changes(config, attention):
        if (each.name, each.how) == wanted and not each.part:
            other = attention if each.attention == "same" else each.attention
            return arm(config, serving.device, other, "" if each.dtype == "same" else each.dtype)
    return None


def _fields(folder: Path) -> str:
    file = folder / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""
