"""A run as one file that needs only sglang and its dependencies: launch/minimal.py's functions, and the templates of
this folder.

`values_of` says what the file must do: settings, the fault to plant and the arms. `render` fills in the template.
"""

import ast
import builtins
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jinja2

from harness.config.draft_rules import draft_of
from harness.config.engine_rules import code_rules
from harness.config.facts import Facts
from harness.config.resolve import sentence
from harness.rollout.engine_settings import engine_defaults, without_models_code
from harness.runtime import redact
from harness.runtime.cpu_standins import STANDINS
from harness.task.tiny_models import is_tiny, tiny_fields
from harness.tools.diagnose.log_lines import INJECTED
from harness.tools.diagnose.symptoms import packages_of
from harness.tools.diagnose.tracebacks import log_lines, tracebacks_in
from harness.tools.environments import REPOSITORY
from harness.tools.export.subject import RankRecord, RunEnd, Subject
from harness.tools.models_code import unasked_code

MINIMAL = REPOSITORY / "launch" / "minimal.py"
"""The program whose functions a file has."""
WIDTH = 120
LONGEST = 600
"""Characters of a message that are kept."""
MOST_PROMPT_TOKENS = 32
"""Longer prompts prove no more about a sync."""
ENGINE = ("EngineFailed", "EngineRefused")
"""Errors that the same calls on the same engine raise again without a planted fault."""
GPU = ("OutOfMemoryError", "CUDAError", "AcceleratorError")
"""Errors of a GPU: the engine's too, except in a phase in which only the trainer works."""
ARRIVAL = ("WeightsDidNotArrive", "NoBaseline")
ALLOWED = ("trainer_rounding", "log_prob_baseline")
"""Events that say which difference of log-probs passes."""
STEP_PHASES = ("resume_weights", "sync", "resume_kv_cache", "generate", "release", "old_log_probs", "update_actor")
ORDER = ("meet", "start_engine", "first_release", "build_trainer", *STEP_PHASES, "shutdown")
LEARNING = ("reference_log_probs", "values", "advantages", "update_critic", "free_caches")
ELSEWHERE = dict.fromkeys(LEARNING, "update_actor") | {
    "inputs": "meet",
    "quantize_model": "meet",
    "import_sglang": "start_engine",
    "load_baseline": "sync",
    "load_checkpoint": "build_trainer",
    "validate": "generate",
    "save_checkpoint": "update_actor",
    "verify_log_probs": "old_log_probs",
    "readback": "sync",
    "bench": "sync",
    "engine_scores": "generate",
    "trainer_scores": "old_log_probs",
    "routers": "old_log_probs",
    "record": "old_log_probs",
    "save_weights": "sync",
}
"""Phases of a run that a program does not have -> the phase of the program that stands for them."""
OF_TRAINER = ("build_trainer", "old_log_probs", "update_actor")
"""Phases of a program in which only the trainer works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What an issue needs to be told besides the program; see evidence.py."""

    slug: str = ""
    """The catalogue's name of what was seen."""
    said: str = ""
    """The line of the run's log that has this name by itself; "" if none has, as where it needs a traceback."""
    check_env: Sequence[str] = ()
    """What `python -m sglang.check_env` printed."""
    bisect: Sequence[str] = ()
    """The bisect's command and answer."""


def check_subject(subject: Subject, server: bool = False) -> None:
    """Raise ValueError for a run that no file can repeat, or should.

    It is one with a draft model, one for a server whose engine does not fit on one host, or one of a model whose code
    SGLang would run unasked.
    """
    parallel = subject.config.parallel
    for wrong in code_rules(subject.config, Facts(code=unasked_code(subject.config))):
        raise ValueError(sentence(subject.config, wrong))
    if draft := draft_of(subject.config.engine.args):
        instead = "remove engine.args.speculative_algorithm if the failure does not need it"
        raise ValueError(f"a file sends no weights of a draft model, and the run has one ({draft}); {instead}.")
    if server and parallel.tp * parallel.pp > subject.nproc_per_node:
        ranks = f"an engine of {parallel.tp * parallel.pp} ranks on hosts of {subject.nproc_per_node}"
        raise ValueError(f"--server needs an engine that fits on one host, got {ranks}; leave --server out.")


def render(subject: Subject, evidence: Evidence | None = None, server: bool = False) -> str:
    """Return the file's text. server: start SGLang's server by its command line and speak HTTP to it.

    Raises ValueError as check_subject does.
    """
    check_subject(subject, server)
    values, evidence = values_of(subject, server), evidence or Evidence()
    values["said"] = redact.text(evidence.said)[:LONGEST] if values["fault"] or values["missing"] else ""
    header = redact.text("\n".join(_header(subject, evidence, values, server)))
    values["header"] = "\n".join(_wrapped(header.split("\n"))).replace('"""', "'''").rstrip("\\")
    return templates().get_template("repro.py.jinja").render(values)


def templates(*folders: Path) -> jinja2.Environment:
    """Return the templates of Python programs in these folders and this one. They have `literal` and `from_minimal`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    environment.filters["literal"] = literal
    environment.globals["from_minimal"] = from_minimal
    return environment


def from_minimal(*names: str) -> str:
    """Return the source of these functions and constants of launch/minimal.py, as it stands there, two lines apart."""
    text = MINIMAL.read_text(encoding="utf-8")
    lines, found = text.splitlines(), dict[str, str]()
    for node in ast.parse(text).body:
        first = node.lineno
        if isinstance(node, ast.FunctionDef):
            name = node.name
            first = min([first, *(each.lineno for each in node.decorator_list)])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        else:
            continue
        while lines[first - 2].startswith("#"):  # the comment above it
            first -= 1
        found.setdefault(name, "\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(found[name] for name in names)


def values_of(subject: Subject, server: bool = False) -> dict[str, Any]:
    """Return what the template needs to know of the run, the header apart."""
    config, parallel, model, device = subject.config, subject.config.parallel, subject.config.model, device_of(subject)
    fields = {**tiny_fields(model.name, device), **model.overrides} if is_tiny(model.name) else {}
    fp8 = model.rollout_precision == "fp8_block"
    is_random = model.weights == "random" and is_tiny(model.name) and not fp8
    # Dummy weights would make the scales of an FP8 engine's KV cache random, and a file has no way to set them.
    dummy = (config.engine.initial_weights == "dummy" or is_random) and not fp8
    own = {"load_format": "dummy" if dummy else "auto", "skip_tokenizer_init": True}
    arguments = engine_defaults(device, config.engine.preset) | own
    given = without_models_code(arguments | config.engine.args)
    arguments |= {name: value for name, value in given.items() if name not in config.engine.args}
    moves_memory = device == "cuda" and bool((arguments | config.engine.args).get("enable_memory_saver"))
    resumes_all = config.memory.resume == "all"
    still = {"first_release", "resume_weights", "resume_kv_cache", "release"} if not moves_memory else set()
    still |= {"resume_kv_cache"} if resumes_all else set()
    fault = planted_fault(
        subject.seen,
        [name for name in ORDER if name not in still],
        was_told=any(each["event"] == INJECTED for each in subject.events),
    )
    missing = missing_tensors(subject.seen)
    seen = subject.seen
    has_own_failure = bool(seen and seen.code and not (fault or missing))
    control = control_without_fault(subject, is_random) if has_own_failure else ""
    timeouts = dict(config.run.phase_timeouts)
    if fault and subject.seen and subject.seen.phase in timeouts:
        timeouts[fault.phase] = timeouts[subject.seen.phase]
    enough = dict[str, float]()  # the control arm's timeout of the phase that took too long
    if fault and subject.seen and subject.seen.kind == "deadline":
        timeouts.setdefault(fault.phase, config.run.timeout_seconds)
        enough[fault.phase] = max(config.run.timeout_seconds, type(config.run)().timeout_seconds)
    group = parallel.tp * parallel.pp
    if fault and server:  # which is not started by torchrun
        fault = replace(fault, statement=fault.statement.replace("os.getppid()", "os.getpid()"))
    choices = {"top_p": config.rollout.top_p, "top_k": config.rollout.top_k}
    return {
        "server": server,
        "cuda": device == "cuda",
        "dtype": model.dtype,
        "master_dtype": model.master_dtype,
        "eager": model.attention == "eager",
        "model": "deepseek_v3" if model.name == "moonlight" else model.name,
        "model_config": {key: value for key, value in fields.items() if value is not None or key == "q_lora_rank"},
        "is_random": is_random,
        "fp8": fp8,
        "unquantized": unquantized_modules() if fp8 else [],
        "is_mla": model.name in ("deepseek_v3", "moonlight"),
        "stand_in_names": stand_in_names(),
        "engine_arguments": arguments,
        "given": {name: given[name] for name in config.engine.args},
        "transport": transport_of(subject),
        "group": group,
        "pp": parallel.pp,
        "many_hosts": subject.nnodes > 1,
        "pp_first": parallel.rank_order == "dp,pp,tp",
        "colocate": parallel.colocate,
        "moves_memory": moves_memory,
        "resumes_all": resumes_all,
        "steps": config.run.steps + 1,
        "seed": config.run.seed,
        "temperature": config.rollout.temperature,
        "sampling": {"ignore_eos": True, **{name: each for name, each in choices.items() if each not in (1.0, -1)}},
        "prompts": max(2, -(-config.rollout.prompts_per_step // parallel.dp)),
        "responses": -(-config.rollout.responses_per_prompt // group) * group,
        "prompt_tokens": min(config.task.max_prompt_tokens, MOST_PROMPT_TOKENS),
        "response_tokens": config.rollout.max_response_tokens,
        "tolerance": allowed(subject, takes_baseline=not (server and device == "cuda")),
        "timeout": config.run.timeout_seconds,
        "timeouts": timeouts,
        "enough": enough,
        "fault": fault,
        "missing": missing,
        "control": control,
        "has_arms": bool(fault or missing or control),
    }


def unquantized_modules() -> list[str]:
    """Return the modules whose matrices block-FP8 leaves as they are."""
    from harness.weights.fp8_blocks import UNQUANTIZED  # imports torch

    return sorted(UNQUANTIZED)


def stand_in_names() -> list[str]:
    """Return the names of sgl_kernel that SGLang's CPU mode imports: those of its stand-in, read without importing
    it.
    """
    tree = ast.parse((STANDINS / "sgl_kernel" / "__init__.py").read_text(encoding="utf-8"))
    found = list[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAMES":
            found += ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom) and node.level:  # those that it has in files of its own
            found += [each.asname or each.name for each in node.names]
    return found


def transport_of(subject: Subject) -> Literal["bucket", "disk", "tensor"]:
    """Return how the file sends weights: as the run did, or in the nearest way that fits in a file."""
    asked = "disk" if subject.config.parallel.pp > 1 else subject.config.weights.transport
    return "bucket" if asked in ("auto", "bucket") else "disk" if asked == "disk" else "tensor"


def _header(subject: Subject, evidence: Evidence, values: dict[str, Any], server: bool) -> list[str]:
    """Return the file's docstring: what this is, how to run it, what was expected and found, and where."""
    command = "python repro.py" if server else f"{subject.torchrun} repro.py"
    return [
        *_what(subject, values, server),
        "",
        *_how_to_run(command, values),
        "",
        f'Expected: exit code 0, and "PASSED: {values["steps"]} of {values["steps"]} steps".',
        *_found(subject.seen, evidence, values),
        *_made_of(subject, values),
        *(["", "Bisect:", *(f"  {line}" for line in evidence.bisect)] if evidence.bisect else []),
        "",
        *_environment(subject.ranks, evidence.check_env),
    ]


def _what(subject: Subject, values: dict[str, Any], server: bool) -> list[str]:
    config, parallel = subject.config, subject.config.parallel
    made = "with random weights" if values["model_config"] else "as it is"
    served = ", the engine in block-FP8," if values["fp8"] else ""
    on = f"{config.model.dtype}{served} on {'cuda' if values['cuda'] else 'cpu'}"
    if server:
        who = "A trainer that sends weights to an sglang server over HTTP"
        mesh = f"tp {parallel.tp}, pp {parallel.pp}, {on}; the trainer is one process on the CPU"
    else:
        who = "A trainer that sends weights to sglang.Engine on the ranks of torchrun"
        mesh = f"dp {parallel.dp}, tp {parallel.tp}, pp {parallel.pp}, {on}"
    return [f"{who}: {config.model.name} {made}, {mesh}."]


def _how_to_run(command: str, values: dict[str, Any]) -> list[str]:
    """Return the commands of both arms, and what the control arm does without."""
    lines = ["It needs sglang, which brings torch and transformers, and nothing else:"]
    if not values["has_arms"]:
        return [*lines, f"    {command}"]
    without, why = {
        "default arguments": (
            "without the run's own engine arguments",
            "SGLang fails by itself.",
        ),
        "no updates": (
            "without updates: the engine reads the checkpoint itself",
            "SGLang fails by itself.",
        ),
        "": (
            "without THE FAULT" + (" and the timeout" if values["enough"] else ""),
            "THE FAULT in this file does on purpose what happened in the run; it does not say whose fault it was.",
        ),
    }[values["control"]]
    lines += [f"    {command}                  # fails as the run did"]
    return [*lines, f"    {command} --arm control    # passes, {without}", why]


def _found(seen: RunEnd | None, evidence: Evidence, values: dict[str, Any]) -> list[str]:
    if seen is None:
        return ["Found: nothing yet; this file was made from a config that was not run."]
    if seen.code == 0:
        return [f"Found: exit code 0. {seen.verdict[0]}"]
    code = "did not end" if seen.code is None else f"exit code {seen.code} of the rank that failed first"
    is_known = evidence.slug and (evidence.said or not (values["fault"] or values["missing"]))
    known = f", known to launch/diagnose.py as {evidence.slug}" if is_known else ""
    return [f"Found: {code}{known}:", *(f"  {line.strip()[:LONGEST]}" for line in seen.verdict[:1])]


def _made_of(subject: Subject, values: dict[str, Any]) -> list[str]:
    """Return the command that was run, and how this file differs from the run."""
    commands = list(dict.fromkeys(each.command for each in subject.ranks if each.command))
    lines = ["The run was started with:", *(f"    {each}" for each in commands)] if commands else []
    asked = subject.config.weights.transport
    if asked not in (values["transport"], "auto"):
        lines.append(f"The run sent weights by {asked}. This file sends them by {values['transport']} instead.")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedFault:
    """A statement that some ranks execute as a phase begins."""

    ranks: tuple[int, ...]
    phase: str
    step: int | None
    statement: str


def control_without_fault(subject: Subject, is_random: bool) -> Literal["", "no updates", "default arguments"]:
    """Return what the control arm does without if SGLang failed by itself; "" if that is not known."""
    assert subject.seen
    if subject.seen.phase in ("import_sglang", "start_engine", "inputs", "meet"):
        return "default arguments" if subject.config.engine.args else ""
    return "" if is_random else "no updates"


def missing_tensors(seen: RunEnd | None) -> tuple[str, ...]:
    """Return the names of the tensors that did not arrive, as far as the run named them; the engine's own do no
    harm.
    """
    if seen is None or _class_name(seen.error) not in ARRIVAL:
        return ()
    listed = re.split(r"(?:from the trainer's|other weights|what was sent|what the engine holds): ", seen.error)[-1]
    return tuple(dict.fromkeys(re.findall(r"\b[a-zA-Z]\w*(?:\.\w+)+", listed)))


def planted_fault(seen: RunEnd | None, phases: Sequence[str], was_told: bool = False) -> PlantedFault | None:
    """Return None where the same calls must fail without help, or nothing failed.

    phases: those of the program. was_told: the run had injected faults, without which SGLang does not fail either.
    """
    if seen is None or seen.code in (0, None) or missing_tensors(seen) or not seen.ranks:
        return None
    if "has no such engine argument" in seen.error or not (statement := _statement(seen, was_told)):
        return None
    meant = ELSEWHERE.get(seen.phase, "sync" if seen.phase.startswith("verify_") else seen.phase)
    later = ORDER[ORDER.index(meant) :] if meant in ORDER else ORDER
    phase = next(each for each in later if each in phases)
    return PlantedFault(
        ranks=seen.ranks[:1] if "os.getppid()" in statement else seen.ranks,  # one signal is enough
        phase=phase,
        step=seen.step or 0 if phase in STEP_PHASES else None,
        statement=statement,
    )


def _statement(seen: RunEnd, was_told: bool) -> str:
    """Return the statement; empty where nothing is planted."""
    if seen.kind == "deadline":
        return f"time.sleep({10**9})"
    if seen.kind in ("launcher", "told"):
        got = re.search(r"got (SIG[A-Z]+)", seen.error)
        return f"os.kill(os.getppid(), signal.{got[1] if got else 'SIGKILL'})"
    if seen.kind == "stopped" and (process := re.match(r"engine process (.*) \(pid \d+\)", seen.error)):
        engine = '__import__("psutil").Process().children(recursive=True)'
        return f"[each.suspend() for each in {engine} if each.name() == {process[1]!a}]"
    if seen.kind in ("died", "ended", "lost", "stopped", "vanished"):
        if code := re.search(r"ended with exit code (\d+)", seen.error):
            return f"leave({code[1]})"
        named = re.search(r"\bSIG[A-Z]+\b", seen.error)
        signal = named[0] if named else "SIGSTOP" if seen.kind == "stopped" else "SIGKILL"
        return f"os.kill(os.getpid(), signal.{signal})"
    message = seen.error.partition(": ")[2][:LONGEST]
    if seen.code in (2, 125):
        return f"leave({seen.code}, {f'error: {message}'!a} + chr(10))"
    if _is_of_sglang(seen) and not was_told:
        return ""
    name = _class_name(seen.error)
    return f"raise {_exception(name, message) if name.isidentifier() else _exception('RuntimeError', seen.error[:LONGEST])}"


def _exception(name: str, message: str) -> str:
    """Return Python code for an exception of this name, which prints the message as it is."""
    builtin = getattr(builtins, name, None)
    if name == ARRIVAL[0]:
        return f"{name}({message!a})"
    with suppress(TypeError):  # UnicodeDecodeError, for one, takes more than a message, and KeyError adds quotes
        if isinstance(builtin, type) and issubclass(builtin, Exception) and str(builtin(message)) == message:
            return f"{name}({message!a})"
    return f"type({name!a}, (RuntimeError,), {{}})({message!a})"


def _is_of_sglang(seen: RunEnd) -> bool:
    """Return whether SGLang failed, and not the trainer or code of the user's own."""
    name, phase = _class_name(seen.error), ELSEWHERE.get(seen.phase, seen.phase)
    if name in ENGINE or (name in GPU and phase not in OF_TRAINER):
        return True
    frames = [frame for each in tracebacks_in(log_lines("\n".join(seen.traceback))) for frame in each.frames]
    return any("sglang" in packages_of(frame.file) for frame in frames)


def _class_name(error: str) -> str:
    """Return WeightsDidNotArrive of "WeightsDidNotArrive: step 0: ..."."""
    return error.partition(":")[0].rpartition(".")[2]


def allowed(subject: Subject, takes_baseline: bool = True) -> str:
    """Return the mean log-prob difference: what the run allowed where it measured that, else what is healthy anywhere.

    takes_baseline: whether the run's own applies, which was measured with a trainer on the same device.
    """
    from harness.weights.log_probs import FLOOR, JUMPS, LARGEST_BASELINE  # imports torch

    model = subject.config.model
    precision = model.dtype if model.rollout_precision == "same" else model.rollout_precision
    if not subject.config.weights.verify:
        return 'float("inf")'
    measured = [each for each in subject.events if takes_baseline and each["event"] in ALLOWED]
    anywhere = {"float32": FLOOR["float32"], "fp8_block": LARGEST_BASELINE["fp8_block"]}.get(precision, JUMPS)
    return f"{measured[0]['allowed'] if measured else anywhere:.2g}"


def device_of(subject: Subject) -> Literal["cpu", "cuda"]:
    """Return the config's device, which a run has resolved; else CUDA if this machine has NVIDIA's driver."""
    if subject.config.engine.device != "auto":
        return subject.config.engine.device
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def literal(value: Any, name: str = "") -> str:
    """Return a Python literal in lines of WIDTH characters. value: of what TOML has; name: that it is assigned to."""
    whole = _expression(value)
    if not isinstance(value, dict | list | tuple) or len(name) + 3 + len(whole) <= WIDTH:
        return whole
    items = _items(value)
    rows = [""]
    for item in items:  # as many as fit, so that a model's shape is a paragraph and not a page
        if rows[-1] and len(rows[-1]) + len(item) + 6 > WIDTH:
            rows.append("")
        rows[-1] += f"{' ' * bool(rows[-1])}{item},"
    return "\n".join([whole[0], *(f"    {row}" for row in rows), whole[-1]])


def _expression(value: Any) -> str:
    """Return Python code for this value, in ASCII. Infinity and NaN have no literal, so they are made by float()."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, dict):
        return f"{{{', '.join(_items(value))}}}"
    if isinstance(value, list):
        return f"[{', '.join(_items(value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(_items(value))}{',' * (len(value) == 1)})"
    return ascii(value)


def _items(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> list[str]:
    if isinstance(value, dict):
        return [f"{key!a}: {_expression(each)}" for key, each in value.items()]
    return [_expression(each) for each in value]


def printable(line: str) -> str:
    """Return a line in ASCII that can be part of a program's text: what does not print is written as its escape."""
    text = "".join(" " if each.isspace() else each if each.isprintable() else ascii(each)[1:-1] for each in line)
    return text.encode("ascii", "backslashreplace").decode()


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Return them in ASCII and in rows of WIDTH.

    What is indented by four spaces is to be pasted, and stays in one row.
    """
    rows = []
    for line in lines:
        text = printable(line)
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        wrap = textwrap.TextWrapper(WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        rows += [text] if text.startswith("    ") else wrap.wrap(text) or [""]
    return rows


def _environment(ranks: Sequence[RankRecord], check_env: Sequence[str]) -> list[str]:
    """Return what check_env printed, and a paragraph for each kind of host; ranks that have the same share it."""
    groups: dict[str, list[RankRecord]] = {}
    for each in ranks:
        values = [f"{name} {version}" for name, version in each.versions.items() if version != "not installed"]
        values += [f"{name}={value}" for name, value in each.environment.items()]
        groups.setdefault(f"{each.device}, {each.platform}, {', '.join(values)}", []).append(each)
    shown = [f"  {len(some)} rank(s) from rank {some[0].rank} on {some[0].host}: {on}" for on, some in groups.items()]
    lines = ["The run's ranks had:", *shown] if shown else []
    if check_env:
        lines += ["python -m sglang.check_env (this file prints it again):", *(f"    {line}" for line in check_env)]
    return lines
