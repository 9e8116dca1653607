"""A repro: one file that needs only torch, transformers and sglang, made from a config or from what a run left."""

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from harness.rollout.defaults import engine_defaults
from harness.runtime import redact
from harness.task.architectures import is_tiny
from harness.task.tiny_models import tiny_fields
from harness.tools.export.faults import EXTRA, NOT_HERE, Plant, missing_tensors, plant_of
from harness.tools.export.literal import WIDTH, literal
from harness.tools.export.subject import RankRecord, Subject

MOST_LINES = 300
PROMPT_TOKENS = 32
"""Longest prompt: enough to prove a sync by."""
SHOWN_ENVIRONMENT = 4
"""Kinds of hosts that are shown."""
LONGEST = 300
"""Characters of a verdict, or of a host's variables, that are shown."""
ABSENT = "not installed"
DENSE = ("qwen2", "qwen3", "llama")
"""Tiny models that no version of transformers fuses."""
STANDINS = Path(__file__).resolve().parents[2] / "runtime" / "standins"

Device = Literal["cpu", "cuda"]


def render(subject: Subject, slug: str = "") -> str:
    """The file's text. slug: the catalogue's name of what was seen, where it has one."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    values = context(subject)
    template = environment.get_template("repro.py.jinja")
    lines = header(subject, values, slug)
    room = MOST_LINES - len(template.render(values | {"header": []}).splitlines())
    if len(lines) > room > 0:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1} lines more, left out"]
    return redact.text(template.render(values | {"header": lines}))


def context(subject: Subject) -> dict[str, Any]:
    """What the template fills in."""
    config, device = subject.config, device_of(subject)
    parallel, model = config.parallel, config.model
    random = model.weights == "random"
    transport = transport_of(subject)
    tiny = is_tiny(model.name)
    shape = (
        {name: value for name, value in tiny_fields(model.name, device).items() if value is not None} if tiny else {}
    )
    model_config = shape | {"num_key_value_heads": shape.get("num_key_value_heads")} | model.overrides if tiny else {}
    if tiny and model_config["num_key_value_heads"] is None:
        del model_config["num_key_value_heads"]
    if model.name == "moonlight":
        model_config["q_lora_rank"] = None
    defaults = engine_defaults(device, config.engine.defaults) | {
        "dtype": model.dtype,
        "load_format": "dummy" if config.engine.initial_weights == "dummy" or random else "auto",
        "skip_tokenizer_init": True,
    }
    saver = device == "cuda" and bool(config.engine.args.get("enable_memory_saver", True))
    dummy = defaults["load_format"] == "dummy"
    resume_all = config.memory.resume == "all"
    phases = ["meet", "start_engine", "build_trainer", "sync", "generate", "old_log_probs", "update_actor", "shutdown"]
    phases += ["resume_weights", "release"] * saver + ["first_release"] * (saver and dummy)
    phases += ["resume_kv_cache"] * (saver and not resume_all)
    plant = plant_of(subject.seen, tuple(phases))
    apart = not parallel.colocate
    check_release = saver and subject.seen is not None and "MemoryDidNotMove" in subject.seen.error
    return {
        "torchrun": f"{subject.torchrun} repro.py",
        "config": config,
        "nnodes": subject.nnodes,
        "cpu": device == "cpu",
        "device": device,
        "transport": transport,
        "model_type": "deepseek_v3" if model.name == "moonlight" else model.name,
        "model_config": {name: value for name, value in model_config.items() if name != "topk_method" or tiny},
        "mla": model.name in ("deepseek_v3", "moonlight"),
        "random": random,
        "engine_defaults": {name: value for name, value in defaults.items() if name not in config.engine.args},
        "engine_args": dict(config.engine.args),
        "prompt_tokens": min(config.task.max_prompt_tokens, PROMPT_TOKENS),
        "sampling": {
            "temperature": config.rollout.temperature,
            "top_p": config.rollout.top_p,
            "top_k": config.rollout.top_k,
            "max_new_tokens": config.rollout.max_response_tokens,
            "ignore_eos": config.rollout.ignore_eos,
        },
        "verified": config.weights.verify != "off",
        "allowed": allowed(subject),
        "saver": saver,
        "dummy": dummy,
        "resume_all": resume_all,
        "apart": apart,
        "engine_gpu": "torch.cuda.current_device() + LOCAL_WORLD" if apart else "",
        "pp_first": parallel.rank_order == "dp,pp,tp",
        "standin_names": standin_names(),
        "errors": _errors(plant, check_release, config.weights.verify != "off"),
        "check_release": check_release,
        "fuses": fuses(subject),
        "tied": model_config.get("tie_word_embeddings", True),
        "without": list(missing_tensors(subject.seen)),
        "without_why": "the run named them as not arrived; here they are left out",
        **_planted(plant),
        "literal": literal,
        "joined": joined,
    }


def _planted(plant: Plant | None) -> dict[str, Any]:
    if plant is None:
        return {"plant": "", "extra_phase": ""}
    place = f"({literal(plant.phase, 0)}, {plant.step})"
    return {
        "plant": plant.statement,
        "plant_ranks": repr(plant.ranks),
        "plant_place": place,
        "plant_why": plant.why,
        "extra_phase": plant.phase if plant.phase in EXTRA else "",
    }


def _errors(plant: Plant | None, check_release: bool, verified: bool) -> list[str]:
    """The exceptions that the file defines."""
    own = [plant.error_class] if plant and plant.error_class else []
    return list(
        dict.fromkeys(
            ["EngineRefused", *["WeightsDidNotArrive"] * verified, *["MemoryDidNotMove"] * check_release, *own]
        )
    )


def allowed(subject: Subject) -> float:
    """Mean log-prob difference: by the run's own baseline where it took one, else what is healthy without."""
    from harness.weights.log_probs import FACTOR, FLOOR, FLOOR_WITHOUT_BASELINE  # imports torch

    dtype = subject.config.model.dtype
    for each in subject.events:
        if each["event"] == "log_prob_baseline":
            return max(FLOOR[dtype], FACTOR * float(each["log_prob_difference_mean"]))
    return FLOOR_WITHOUT_BASELINE[dtype]


def device_of(subject: Subject) -> Device:
    """As the config says; else as the run's memory figures say; else whether this machine has NVIDIA's driver."""
    if subject.config.engine.device != "auto":
        return subject.config.engine.device
    if subject.ranks:
        figures = [each["memory"] for each in subject.events if each["event"] == "phase_end"]
        return "cuda" if any("total" in each for each in figures) else "cpu"
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def transport_of(subject: Subject) -> Literal["tensor", "bucket", "disk"]:
    """The one that the repro has which is nearest to the run's."""
    config = subject.config
    if config.parallel.pp > 1 or config.weights.transport == "disk":
        return "disk"
    return "bucket" if config.weights.transport == "bucket" else "tensor"


def fuses(subject: Subject) -> Literal["always", "perhaps", "never"]:
    """Whether transformers holds a mixture's experts fused, under other names than a checkpoint's: since version 5."""
    if subject.config.model.name in DENSE:
        return "never"
    versions = [each.versions.get("transformers", "") for each in subject.ranks] or [_installed("transformers")]
    major = {version.partition(".")[0] for version in versions}
    if len(major) != 1 or not (number := major.pop()).isdecimal():
        return "perhaps"
    return "always" if int(number) >= 5 else "never"


def _installed(package: str) -> str:
    """The version of a package here, where it will run as likely as not; empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def standin_names() -> list[str]:
    """What sgl_kernel's stand-in has, as its file says."""
    tree = ast.parse((STANDINS / "sgl_kernel" / "__init__.py").read_text(encoding="utf-8"))
    return [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]


def joined(names: Sequence[str]) -> str:
    """A literal of all names with blanks between, over as many lines as it takes."""
    rows = textwrap.wrap(" ".join(names), WIDTH - 12)
    if len(rows) == 1 and len(rows[0]) < WIDTH // 2:
        return f'"{rows[0]}"'
    lines = "".join(f'    "{row}{" " if row is not rows[-1] else ""}"\n' for row in rows)
    return f"(\n{lines})"


def header(subject: Subject, values: Mapping[str, Any], slug: str) -> list[str]:
    """The comment below the first line: what this is, what was expected and seen, and where."""
    config, parallel = subject.config, subject.config.parallel
    made = "with random weights" if values["model_config"] else "as it is"
    mesh = f"dp {parallel.dp}, tp {parallel.tp}, pp {parallel.pp}, {config.model.dtype}, on {values['device']}"
    lines = [f"Trainer to sglang, without a framework: {config.model.name} {made}, {mesh}."]
    lines += [f"Needs torch, transformers and sglang. Made by launch/export.py of {Path(subject.words[0]).name}."]
    lines += [f'Expected: exit code 0, and "PASSED: {config.run.steps} steps, {config.run.steps + 1} weight syncs".']
    lines += _seen(subject, values, slug)
    asked = config.weights.transport
    if asked not in (values["transport"], "auto"):
        lines.append(f"The run sent weights by {asked}, which is not in this file; here it is {values['transport']}.")
    shown = [*lines, *_environment(subject.ranks)]
    wrapped = [
        row
        for line in shown
        for row in textwrap.wrap(
            line.encode("ascii", "backslashreplace").decode(),
            WIDTH - 2,
            subsequent_indent="  " + re.match(" *", line)[0],  # type: ignore[index]
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    ]
    return wrapped


def _seen(subject: Subject, values: Mapping[str, Any], slug: str) -> list[str]:
    seen = subject.seen
    if seen is None:
        return ["Seen: nothing yet, this was made of a config that was not run."]
    code = "did not end" if seen.code is None else f"exit code {seen.code} of the rank that failed first"
    if seen.code == 0:
        return [f"Seen: exit code 0. {seen.verdict[0]}"]
    lines = [f"Seen: {code}; {f'known as {slug}' if slug else 'no known failure'}."]
    lines += [f"  {line.strip()[:LONGEST]}" for line in seen.verdict[:1]]
    if seen.traceback and values["plant"]:
        lines += ["  Its traceback ends:"]
        lines += [f"    {_short(line)}" for line in seen.traceback[-3:] if set(line.strip()) - set("^~")]
    if values["without"] or values["plant"]:
        lines.append('What failed in the run is done on purpose here: see "THE FAULT".')
    elif seen.kind in NOT_HERE:
        lines.append(
            "Nothing can be planted here: a watchdog ended, which this file has not; the same calls should pass."
        )
    else:
        lines.append("Nothing is planted here: the same calls must fail by themselves.")
    return lines


def _short(line: str) -> str:
    """A traceback's line without the folders of a machine."""
    return re.sub(r'File ".*?([^/]+/[^/"]+)"', r'File "\1"', line.strip())[: WIDTH * 2]


def _environment(ranks: Sequence[RankRecord]) -> list[str]:
    """One paragraph for each kind of host; ranks that have the same share it."""
    if not ranks:
        return []
    groups: dict[tuple[Any, ...], list[RankRecord]] = {}
    for each in ranks:
        key = (each.device, each.platform, tuple(each.versions.items()), tuple(each.environment.items()))
        groups.setdefault(key, []).append(each)
    lines = ["Environment:"]
    for alike in list(groups.values())[:SHOWN_ENVIRONMENT]:
        hosts = list(dict.fromkeys(each.host for each in alike))
        some = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        here = f"{alike[0].device}, {alike[0].platform}"
        lines.append(f"  {len(alike)} rank(s) from rank {alike[0].rank} on {some}: {here}")
        shown_versions = [f"{name} {version}" for name, version in alike[0].versions.items() if version != ABSENT]
        if alike[0] is ranks[0] or alike[0].versions != ranks[0].versions:
            lines.append(f"    {', '.join(shown_versions)}")
        shown = [f"{name}={value}" for name, value in redact.variables(alike[0].environment).items()]
        lines += [f"    {' '.join(shown)[:LONGEST]}"] * bool(shown)
    if len(groups) > SHOWN_ENVIRONMENT:
        lines.append(f"  and {len(groups) - SHOWN_ENVIRONMENT} more kinds")
    return lines
