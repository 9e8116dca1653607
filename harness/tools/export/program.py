"""A run as one file that needs only torch, transformers and sglang: launch/minimal.py with the run's settings and fault.

The file has, by source, the functions of launch/minimal.py and of pasted.py that it needs, with the edits below. An edit that
does not find its place is an error.
"""

import ast
import builtins
import re
import runpy
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from harness.rollout.defaults import engine_defaults
from harness.runtime import redact
from harness.runtime.cpu_standins import STANDINS
from harness.tools.export.subject import RankRecord, RunEnd, Subject
from harness.tools.tiny_models import is_tiny, tiny_fields

MOST_LINES = 360
WIDTH = 120
LONGEST = 600
"""Characters of a message that are kept."""
MINIMAL = Path(__file__).resolve().parents[3] / "launch" / "minimal.py"
PASTED = Path(__file__).with_name("pasted.py")
EDITS = {
    "call": [(r"None\)  # .*?\n", 'None) if mesh.get_local_rank("tp") == 0 else None  # not in every release\n')],
    "rollout": [(r"    rewards = .*?    batch = ", "    batch = "), (r'        "rewards": .*?    }\n', "    }\n")],
    "write_tiny": [(r"    shape: .*?(    torch\.manual_seed.*?)\*\*shape", r"\1**MODEL_CONFIG")],
}
"""Of functions, patterns that match once, and what takes their place: engines of later nodes take no calls, and nothing is learned."""
ENGINE = ("EngineFailed", "EngineRefused", "OutOfMemoryError", "CUDAError")
"""Errors that the same calls on the same engine raise without help."""
ARRIVAL = ("WeightsDidNotArrive", "NoBaseline")
PACKAGE = re.compile(r'^\s*File ".*[/\\](?:sglang|transformers)[/\\]')
STEP_PHASES = ("resume_weights", "sync", "resume_kv_cache", "generate", "release", "old_log_probs", "update_actor")
ORDER = ("meet", "start_engine", "first_release", "build_trainer", *STEP_PHASES, "shutdown")
LEARNING = ("reference_log_probs", "values", "advantages", "update_critic", "free_caches")
ELSEWHERE = dict.fromkeys(LEARNING, "update_actor") | {
    "inputs": "meet",
    "import_sglang": "start_engine",
    "load_baseline": "sync",
    "verify_log_probs": "old_log_probs",
    "verify_movement": "update_actor",
    "find_suspects": "old_log_probs",
    "readback": "sync",
    "bench": "sync",
}
"""Phases of a run that a program does not have -> its phase in their place."""


def render(subject: Subject, slug: str = "") -> str:
    """Return the file's text. slug: the catalogue's name of what was seen, where it has one."""
    program = _Program(subject)
    body = program.body()
    lines = _wrapped(program.header(slug))
    room = MOST_LINES - len(body.splitlines()) - 1
    if len(lines) > room > 0:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1} lines more, left out"]
    return redact.text("".join(f"# {line}".rstrip() + "\n" for line in [f"{subject.torchrun} repro.py", *lines]) + body)


class _Program:
    """The program of one run."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.config, self.device = subject, subject.config, device_of(subject)
        config, model = self.config, self.config.model
        asked = "disk" if config.parallel.pp > 1 else config.weights.transport
        self.transport = {"auto": "bucket", "bucket": "bucket", "disk": "disk"}.get(asked, "tensor")
        fields = {**tiny_fields(model.name, self.device), **model.overrides} if is_tiny(model.name) else {}
        self.model_config = {key: value for key, value in fields.items() if value is not None or key == "q_lora_rank"}
        self.is_random = model.weights == "random" and is_tiny(model.name)
        dummy = config.engine.initial_weights == "dummy" or self.is_random
        own = {"load_format": "dummy" if dummy else "auto", "skip_tokenizer_init": True}
        self.engine_arguments = engine_defaults(self.device, config.engine.defaults) | own | config.engine.args
        left_out = {"resume_kv_cache"} if config.memory.resume == "all" else set()
        if self.device == "cpu" or not self.engine_arguments.get("enable_memory_saver"):
            left_out |= {"first_release", "resume_weights", "resume_kv_cache", "release"}
        self.phases = tuple(name for name in ORDER if name not in left_out)
        self.fault = planted_fault(subject.seen, self.phases)
        self.missing = missing_tensors(subject.seen)
        self.timeouts = dict(config.run.phase_timeouts)
        if self.fault and subject.seen and subject.seen.phase in self.timeouts:
            self.timeouts[self.fault.phase] = self.timeouts[subject.seen.phase]

    def body(self) -> str:
        """Return the program below its header."""
        parallel, functions, pasted = self.config.parallel, self._functions(), PASTED.read_text(encoding="utf-8")
        text = "\n\n\n".join(functions.values())
        constants = {
            "ENGINE_ARGUMENTS": self.engine_arguments,
            "GIVEN": tuple(self.config.engine.args),
            "MODEL_CONFIG": self.model_config,
            "PP": parallel.pp,
            "PP_FIRST": parallel.rank_order == "dp,pp,tp",
            "COLOCATE": parallel.colocate,
            "TIMEOUT": self.config.run.timeout_seconds,
            "TIMEOUTS": self.timeouts,
            "MISSING": self.missing,
        }
        used = {name: value for name, value in constants.items() if _uses(text, rf"{name}\b")}
        shown = [f'DEVICE, DTYPE = "{self.device}", torch.{self.config.model.dtype}']
        shown += [f"{name} = {literal(value, name)}" for name, value in used.items()]
        shown += [pasted.split("# Of every program.\n")[1].partition("\n\n\n")[0]]
        if self.device == "cpu":
            sources = _sources(PASTED)
            shown += ["", "# In every process of an engine too: SGLang's import this file, as __mp_main__."]
            names = runpy.run_path(str(STANDINS / "sgl_kernel" / "__init__.py"))["NAMES"]
            shown += [f"NAMES = {literal(names, 'NAMES')}", textwrap.dedent(_inside(sources["add_stand_ins"]))]
            if self.config.model.name in ("deepseek_v3", "moonlight"):
                shown += ['if __name__ == "__mp_main__":', _inside(sources["register_absorbed_mla"])]
        last = pasted[pasted.index('if __name__ == "__main__"') :]
        body = "\n\n\n".join(["\n".join(shown), self._settings(text), text, last])
        return f"{_imports(body)}\n\n{body}"

    def _functions(self) -> dict[str, str]:
        """Return the functions that main() reaches, edited, by name."""
        functions = _sources(MINIMAL) | _sources(PASTED)
        chosen = ["main__of_run", "start_engine__anywhere", "train__in_phases", f"sync_weights__{self.transport}"]
        chosen += ["write_tiny__random", "build_actor__random"] * self.is_random
        for name, (pattern, new) in [(name, edit) for name, edits in (EDITS | self._edits()).items() for edit in edits]:
            functions[name], count = re.subn(pattern, new, functions[name], flags=re.DOTALL)
            if count != 1:
                raise RuntimeError(f"{name}() must have {pattern} once for an export")
        for name in set(chosen) & set(functions):
            plain = name.partition("__")[0]
            functions[plain] = functions[name].replace(f"def {name}(", f"def {plain}(")
        if fault := self.fault:
            functions["phase"] += f"\n    if RANK in {fault.ranks} and (name, step) == ({fault.phase!a}, {fault.step}):"
            functions["phase"] += f"\n        # THE FAULT, in place of what is seen above\n        {fault.statement}"
        functions = {name: _folded(text, self.device == "cuda") for name, text in functions.items() if "__" not in name}
        for name in set(ORDER) - set(self.phases):  # the engine's memory does not move
            functions["train"] = re.sub(rf' +phase\("{name}".*\n.*\n', "", functions["train"])
        wanted, reached = ["main"], set[str]()
        while wanted:
            reached.add(name := wanted.pop())
            wanted += [each for each in functions if each not in reached and _uses(functions[name], f"{each}(?=[(,)])")]
        return {name: text for name, text in functions.items() if name in reached}

    def _edits(self) -> dict[str, list[tuple[str, str]]]:
        """Return those of this run, as EDITS."""
        config = self.config
        eager = ', attn_implementation="eager"' if config.model.attention == "eager" else ""
        choices = {"top_p": config.rollout.top_p, "top_k": config.rollout.top_k}
        more = "".join(f', "{name}": {value}' for name, value in choices.items() if value not in (1.0, -1))
        edits = {
            "rollout": [*EDITS["rollout"], (r'"ignore_eos": True', rf"\g<0>{more}")],
            "build_actor": [(r"dtype=torch\.float32\)", f"dtype=torch.{config.model.master_dtype}{eager})")],
        }
        if config.memory.resume == "all":
            edits["train__in_phases"] = [('"resume", "weights"', '\\g<0>, "kv_cache"')]
        if self.missing:
            why = "# THE FAULT: tensors that the run named as not arrived are left out"
            edits["checkpoint_tensors"] = [
                (r"        yield (.*?)}", rf"        {why}\n        yield \1 if name not in MISSING}}")
            ]
        return edits

    def _settings(self, text: str) -> str:
        """Return the class Settings with what the functions use of it."""
        config, parallel = self.config, self.config.parallel
        group = parallel.tp * parallel.pp
        responses = -(-config.rollout.responses_per_prompt // group) * group
        fields = {
            "model: str": f'"{"deepseek_v3" if config.model.name == "moonlight" else config.model.name}"',
            "tp: int": f"{group}  # ranks of an engine",
            "steps: int": f"{config.run.steps + 1}  # once more than the run, for the last update",
            "learning_rate: float": "0.0  # nothing is learned here",
            "seed: int": config.run.seed,
            "prompts: int": f"{max(2, -(-config.rollout.prompts_per_step // parallel.dp))}  # of an engine and step",
            "responses: int": responses,
            "prompt_tokens: int": min(config.task.max_prompt_tokens, 32),  # enough to prove a sync by
            "response_tokens: int": config.rollout.max_response_tokens,
            "temperature: float": config.rollout.temperature,
            "tolerance: float": f"{allowed(self.subject)}  # mean |engine's log-prob - actor's|, in nats",
        }
        used = [name for name in fields if f"settings.{name.partition(':')[0]}" in text]
        return "\n".join(
            ["@dataclass(frozen=True)", "class Settings:", *(f"    {name} = {fields[name]}" for name in used)]
        )

    def header(self, slug: str) -> list[str]:
        """Return the comment below the first line: what this is, what was expected and seen, and where."""
        config, parallel, asked = self.config, self.config.parallel, self.config.weights.transport
        made = "with random weights" if self.model_config else "as it is"
        mesh = f"dp {parallel.dp}, tp {parallel.tp}, pp {parallel.pp}, {config.model.dtype}, on {self.device}"
        lines = [f"Trainer to sglang, without a framework: {config.model.name} {made}, {mesh}."]
        lines += [f"Needs torch, transformers, sglang. Made by launch/export.py of {Path(self.subject.words[0]).name}."]
        lines += [f'Expected: exit code 0, and "PASSED: {config.run.steps + 1} of {config.run.steps + 1} steps".']
        lines += self._seen(slug)
        if asked not in (self.transport, "auto"):
            lines.append(f"The run sent weights by {asked}, which is not in this file; here it is {self.transport}.")
        return lines + _environment(self.subject.ranks)

    def _seen(self, slug: str) -> list[str]:
        seen = self.subject.seen
        if seen is None:
            return ["Seen: nothing yet, this was made of a config that was not run."]
        if seen.code == 0:
            return [f"Seen: exit code 0. {seen.verdict[0]}"]
        code = "did not end" if seen.code is None else f"exit code {seen.code} of the rank that failed first"
        lines = [f"Seen: {code}; {f'known as {slug}' if slug else 'no known failure'}."]
        lines += [f"  {line.strip()[:LONGEST]}" for line in seen.verdict[:1]]
        if self.missing or self.fault:
            return [*lines, 'What failed in the run is done on purpose here: see "THE FAULT".']
        return [*lines, "Nothing is planted here: what failed was sglang's, or a watchdog, which this file has not."]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedFault:
    """A statement that some ranks execute as a phase begins."""

    ranks: tuple[int, ...]
    phase: str
    step: int | None
    statement: str


def missing_tensors(seen: RunEnd | None) -> tuple[str, ...]:
    """Return the names of the tensors that did not arrive, as far as the run named them; the engine's own do no harm."""
    if seen is None or _class_name(seen.error) not in ARRIVAL:
        return ()
    listed = re.split(r"(?:from the trainer's|other weights|what was sent|what the engine holds): ", seen.error)[-1]
    return tuple(dict.fromkeys(re.findall(r"\b[a-zA-Z]\w*(?:\.\w+)+", listed)))


def planted_fault(seen: RunEnd | None, phases: Sequence[str]) -> PlantedFault | None:
    """Return None where the same calls must fail without help, or nothing failed. phases: those of the program."""
    if seen is None or seen.code in (0, None) or missing_tensors(seen) or not seen.ranks:
        return None
    if "has no such engine argument" in seen.error or not (statement := _statement(seen)):
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


def _statement(seen: RunEnd) -> str:
    """Return the statement; empty where nothing is planted."""
    if seen.kind == "deadline":
        return f"time.sleep({10**9})"
    if seen.kind == "watchdog":  # which a program does not have
        return ""
    if seen.kind in ("launcher", "told"):
        got = re.search(r"got (SIG[A-Z]+)", seen.error)
        return f"os.kill(os.getppid(), signal.{got[1] if got else 'SIGKILL'})"
    if seen.kind == "stopped" and (process := re.match(r"engine process (.*) \(pid \d+\)", seen.error)):
        engine = '__import__("psutil").Process().children(recursive=True)'
        return f"[each.suspend() for each in {engine} if each.name() == {process[1]!a}]"
    if seen.kind in ("died", "ended", "lost", "stopped"):
        if code := re.search(r"ended with exit code (\d+)", seen.error):
            return f"leave({code[1]})"
        named = re.search(r"\bSIG[A-Z]+\b", seen.error)
        signal = named[0] if named else "SIGSTOP" if seen.kind == "stopped" else "SIGKILL"
        return f"os.kill(os.getpid(), signal.{signal})"
    message = seen.error.partition(": ")[2][:LONGEST]
    if seen.code in (2, 125):
        return f"leave({seen.code}, {f'error: {message}'!a} + chr(10))"
    name = _class_name(seen.error)
    if name in ENGINE or any(PACKAGE.match(line) for line in seen.traceback) or not name.isidentifier():
        return ""
    builtin = getattr(builtins, name, None)
    is_known = name == ARRIVAL[0] or (isinstance(builtin, type) and issubclass(builtin, Exception))
    return f"raise {name if is_known else f'type({name!a}, (RuntimeError,), {{}})'}({message!a})"


def _class_name(error: str) -> str:
    """Return WeightsDidNotArrive of "WeightsDidNotArrive: step 0: ..."."""
    return error.partition(":")[0].rpartition(".")[2]


def allowed(subject: Subject) -> str:
    """Return the mean log-prob difference: by the run's baseline where it took one, else what is healthy without."""
    from harness.weights.log_probs import FACTOR, FLOOR, FLOOR_WITHOUT_BASELINE  # imports torch

    dtype = subject.config.model.dtype
    if subject.config.weights.verify == "off":
        return 'float("inf")'
    taken = [each["log_prob_difference_mean"] for each in subject.events if each["event"] == "log_prob_baseline"]
    return f"{max(FLOOR[dtype], FACTOR * taken[0]) if taken else FLOOR_WITHOUT_BASELINE[dtype]:.2g}"


def device_of(subject: Subject) -> Literal["cpu", "cuda"]:
    """Return the config's device, which a run has resolved; else CUDA if this machine has NVIDIA's driver."""
    if subject.config.engine.device != "auto":
        return subject.config.engine.device
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def literal(value: Any, name: str) -> str:
    """Return a Python literal in lines of WIDTH characters. value: of what TOML has; name: that it is assigned to."""
    whole = ascii(value)
    if not isinstance(value, dict | list | tuple) or len(name) + 3 + len(whole) <= WIDTH:
        return whole
    items = [f"{key!a}: {each!a}" for key, each in value.items()] if isinstance(value, dict) else map(ascii, value)
    rows = [""]
    for item in items:  # as many as fit, so that a model's shape is a paragraph and not a page
        if rows[-1] and len(rows[-1]) + len(item) + 6 > WIDTH:
            rows.append("")
        rows[-1] += f"{' ' * bool(rows[-1])}{item},"
    return "\n".join([whole[0], *(f"    {row}" for row in rows), whole[-1]])


@cache
def _sources(file: Path) -> dict[str, str]:
    """Return the text of each function of a file that ruff has formatted."""
    blocks = file.read_text(encoding="utf-8").split("\n\n\n")
    return {found[1]: block for block in blocks if (found := re.search(r"^def (\w+)", block, re.MULTILINE))}


def _folded(text: str, is_cuda: bool) -> str:
    """Return a function without the branches for the other device."""
    lines = text.splitlines()
    [function] = ast.parse(text).body
    for node in reversed(list(ast.walk(function))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "DEVICE == 'cuda'":
            body = node.body if is_cuda else node.orelse
            first = node.lineno if is_cuda else body[0].lineno - 1 if body else 0
            last = body[-1].end_lineno if body else 0
            lines[node.lineno - 1 : node.end_lineno] = [line[4:] for line in lines[first:last]]
    return "\n".join(lines)


def _inside(function: str) -> str:
    """Return the statements of a function that has a docstring of one line."""
    return "\n".join(function.splitlines()[2:])


def _uses(text: str, name: str) -> bool:
    return re.search(rf"\b{name}", text) is not None


def _imports(body: str) -> str:
    """Return the import statements of pasted.py that the text needs."""
    lines = []
    for node in ast.parse(PASTED.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [each for each in node.names if re.search(rf"\b{each.asname or each.name}\b", body)]
            lines += [ast.unparse(node)] if node.names else []
    return "\n".join(lines).replace("\nimport torch\n", "\n\nimport torch\n", 1)


def _wrapped(lines: Iterable[str]) -> list[str]:
    rows = []
    for line in lines:
        text, indent = line.encode("ascii", "backslashreplace").decode(), " " * (len(line) - len(line.lstrip()) + 2)
        options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        rows += textwrap.wrap(text, WIDTH - 2, **options) or [""]  # type: ignore[arg-type]
    return rows


def _environment(ranks: Sequence[RankRecord]) -> list[str]:
    """Return a paragraph for each kind of host; ranks that have the same share it."""
    groups: dict[str, list[RankRecord]] = {}
    for each in ranks:
        values = [f"{name} {version}" for name, version in each.versions.items() if version != "not installed"]
        values += [f"{name}={value}" for name, value in redact.variables(each.environment).items()]
        groups.setdefault(f"{each.device}, {each.platform}, {', '.join(values)}", []).append(each)
    shown = [f"  {len(some)} rank(s) from rank {some[0].rank} on {some[0].host}: {on}" for on, some in groups.items()]
    return ["Environment:", *shown] if shown else []
