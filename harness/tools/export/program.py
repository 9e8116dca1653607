"""A run as one file that needs only torch, transformers and sglang: launch/minimal.py with the run's settings and fault.

The file has, by source, the functions of launch/minimal.py and of pasted.py that it needs, with the edits below. An edit that
does not find its place is an error.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from harness.rollout.defaults import engine_defaults
from harness.runtime import redact
from harness.runtime.cpu_standins import STANDINS
from harness.task.tiny_models import is_tiny, tiny_fields
from harness.tools.export.planted_fault import (
    EXTRA,
    NOT_HERE,
    ORDER,
    STEP_PHASES,
    missing_tensors,
    planted_fault,
    quoted,
)
from harness.tools.export.subject import RankRecord, Subject

MOST_LINES = 360
WIDTH = 120
PROMPT_TOKENS = 32
"""Longest prompt: enough to prove a sync by."""
SHOWN_ENVIRONMENTS = 4
"""Kinds of hosts that are shown."""
LONGEST = 300
"""Characters of a verdict, or of a host's variables, that are shown."""
MINIMAL = Path(__file__).resolve().parents[3] / "launch" / "minimal.py"
PASTED = Path(__file__).with_name("pasted.py")
BEGINS = (
    ('memory(engine, mesh, "release", "kv_cache", "weights")', "first_release"),
    ("model = build_actor(", "build_trainer"),
    ('memory(engine, mesh, "resume", "weights")', "resume_weights"),
    ("if steps != settings.skip_sync:", "sync"),
    ('memory(engine, mesh, "resume", "kv_cache")', "resume_kv_cache"),
    ("batch = rollout(engine, mesh, settings, steps, ", "generate"),
    ('memory(engine, mesh, "release", "kv_cache", "weights")', "release"),
    ("difference = log_prob_difference(", "old_log_probs"),
    ("shown = train_step(", "update_actor"),
)
"""Lines of train(), in their order, and the phases that begin there."""
EDITS = {
    "train": [
        ("model, optimizer = build_actor(folder, settings.learning_rate)", "model = build_actor(folder)"),
        ("steps, proven, worst, passed = 0, 0, 0.0, stale > tolerance", "steps, worst, passed = 0, 0.0, True"),
        ("  after the update {stale:.1e}", ""),
        (" steps, {proven} syncs proven", " steps"),
        (
            "f\"reward {mean_over_ranks(batch['rewards']):.3f}  {train_step(model, optimizer, trained, settings)}\"",
            "train_step(model, settings)",
        ),
    ],
    "start_engine": [
        ("        return sglang.", '        arguments["custom_sigquit_handler"] = engine_died\n        return sglang.'),
    ],
    "write_tiny": [("**shape", "**MODEL_CONFIG")],
    "build_actor": [
        (
            "(folder: str, learning_rate: float) -> tuple[nn.Module, torch.optim.Optimizer]",
            "(folder: str) -> nn.Module",
        ),
        (", and make its AdamW, all in float32", ""),
        (", torch.optim.AdamW(model.parameters(), lr=learning_rate)", ""),
    ],
}
"""Of functions, text that occurs once, and what takes its place: nothing is learned here."""
DROPPED = {
    "train": 'batch = rollout(engine, mesh, settings, -1|# The control run|stale = |say(f"before|held = |proven += |trained = '
    "|# The next step",
    "rollout": 'rewards = |"rewards": |"advantages": ',
    "write_tiny": 'shape|if name == "deepseek_v3"|rope = ',
}
"""Of functions, lines that begin so."""
MAIN = """

if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        leave(1, f"{traceback.format_exc()}rank {RANK} FAILED in {PHASE['place']}: {type(error).__name__}: {error}\\n")
"""


UNKNOWN_ARGUMENT = """\
        for name in set(GIVEN) - set(signature(ServerArgs).parameters):
            leave(2, f"error: engine.args.{name}: sglang {sglang.__version__} has no such engine argument.\\n")"""


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
        config, model, parallel = self.config, self.config.model, self.config.parallel
        self.transport = "disk" if parallel.pp > 1 else config.weights.transport
        if self.transport not in ("bucket", "disk"):
            self.transport = "bucket" if self.transport == "auto" else "tensor"
        fields = {**tiny_fields(model.name, self.device), **model.overrides} if is_tiny(model.name) else {}
        self.model_config = {key: value for key, value in fields.items() if value is not None or key == "q_lora_rank"}
        self.is_random = model.weights == "random" and is_tiny(model.name)
        dummy = config.engine.initial_weights == "dummy" or self.is_random
        own = {"load_format": "dummy" if dummy else "auto", "skip_tokenizer_init": True}
        self.engine_arguments = engine_defaults(self.device, config.engine.defaults) | own | config.engine.args
        self.saver = self.device == "cuda" and bool(self.engine_arguments.get("enable_memory_saver"))
        self.is_anywhere = subject.nnodes > 1 or parallel.pp > 1 or not parallel.colocate
        self.verified = config.weights.verify != "off"
        left_out = {"resume_kv_cache"} if config.memory.resume == "all" else set()
        left_out |= set() if self.saver else {"first_release", "resume_weights", "resume_kv_cache", "release"}
        self.phases = tuple(name for name in ORDER if name not in left_out)
        self.fault = planted_fault(subject.seen, self.phases)
        self.missing = missing_tensors(subject.seen)

    def body(self) -> str:
        """Return the program below its header."""
        parallel, functions = self.config.parallel, self._functions()
        text = "\n\n\n".join(functions.values())
        constants = {
            "DEVICE, DTYPE": f'"{self.device}", torch.{self.config.model.dtype}',
            "ENGINE_ARGUMENTS": literal(self.engine_arguments, "ENGINE_ARGUMENTS: dict[str, Any]"),
            "GIVEN": literal(tuple(self.config.engine.args), "GIVEN"),
            "MODEL_CONFIG": literal(self.model_config, "MODEL_CONFIG: dict[str, Any]"),
            "PP, PP_FIRST, COLOCATE": f"{parallel.pp}, {parallel.rank_order == 'dp,pp,tp'}, {parallel.colocate}",
            "TIMEOUT, TIMEOUTS": f"{self.config.run.timeout_seconds}, {literal(self.config.run.phase_timeouts, 'TIMEOUTS')}",
            "MISSING": literal(self.missing, "MISSING"),
        }
        shown = [
            f"{name} = {value}"
            for name, value in constants.items()
            if any(_uses(text, each) for each in name.split(", "))
        ]
        shown = [re.sub(r"^(ENGINE_ARGUMENTS|MODEL_CONFIG) =", r"\1: dict[str, Any] =", line) for line in shown]
        shown += [ast.unparse(node).replace("'", '"') for node in _parsed(PASTED).body if _is_state(node)]
        errors = ["WeightsDidNotArrive"] * self.verified + ([self.fault.error_class] if self.fault else [])
        shown += [f'{name} = type("{name}", (RuntimeError,), {{}})' for name in dict.fromkeys(filter(None, errors))]
        if self.device == "cpu":
            pasted = _sources(PASTED)
            shown += ["", "# In every process of an engine too: SGLang's import this file, as __mp_main__."]
            shown += [f"NAMES = {_joined(_stand_in_names())}", textwrap.dedent(_inside(pasted["add_stand_ins"]))]
            if self._is_mla:
                shown += ['if __name__ == "__mp_main__":', _inside(pasted["register_absorbed_mla"])]
        body = "\n\n\n".join(["\n".join(shown), self._settings(text), text]) + "\n" + MAIN
        return f"{_imports(body)}\n\n{body}"

    @property
    def _is_mla(self) -> bool:
        return self.config.model.name in ("deepseek_v3", "moonlight")

    def _functions(self) -> dict[str, str]:
        """Return the functions that main() reaches, edited, by name."""
        words = {"train_step": "change", "sync_weights": self.transport}
        if self.is_anywhere:
            words["start_engine"] = "anywhere"
        if self.is_random:
            words |= {"write_tiny": "random", "build_actor": "random"}
        minimal, pasted = _sources(MINIMAL), _sources(PASTED)
        plain = {name: _without_docstring(text) for name, text in pasted.items() if "__" not in name}
        functions = {name: plain.get(name, text) for name, text in (plain | minimal).items() if name != "main"}
        functions["main"] = plain["main"]
        for name, word in words.items():
            if f"{name}__{word}" in pasted:
                functions[name] = pasted[f"{name}__{word}"].replace(f"def {name}__{word}(", f"def {name}(")
        for edits in (EDITS, self._edits()):
            for name in edits.keys() - (words.keys() - {"start_engine"}):
                for old, new in edits[name]:
                    if functions[name].count(old) != 1:
                        raise RuntimeError(f"{name}() must have {old!r} once for an export")
                    functions[name] = functions[name].replace(old, new)
        for name, beginnings in DROPPED.items():
            kept = (
                line
                for line in functions[name].splitlines()
                if not line.strip().startswith(tuple(beginnings.split("|")))
            )
            functions[name] = "\n".join(kept)
        functions = {name: _folded(text, self.device == "cuda") for name, text in functions.items()}
        functions["train"] = self._with_phases(functions["train"])
        if fault := self.fault:
            place = f'("{fault.phase}", {fault.step})'
            functions["phase"] += f"\n    if RANK in {fault.ranks} and (name, step) == {place}:"
            functions["phase"] += f"\n        # THE FAULT: {fault.why}\n        {fault.statement}"
        wanted, reached = ["main"], set[str]()
        while wanted:
            reached.add(name := wanted.pop())
            wanted += [each for each in functions if each not in reached and _uses(functions[name], each)]
        return {name: text for name, text in functions.items() if name in reached}

    def _edits(self) -> dict[str, list[tuple[str, str]]]:
        """Return what is replaced in functions: text that occurs once, and what takes its place."""
        config = self.config
        eager = ', attn_implementation="eager"' if config.model.attention == "eager" else ""
        choices = {"top_p": config.rollout.top_p, "top_k": config.rollout.top_k}
        more = "".join(f', "{name}": {value}' for name, value in choices.items() if value not in (1.0, -1))
        edits = {
            "rollout": [('"ignore_eos": True}', f'"ignore_eos": True{more}}}')],
            "build_actor": [("dtype=torch.float32)", f"dtype=torch.{config.model.master_dtype}{eager})")],
            "main": [(" if MODEL_CONFIG else settings.model", "")],
        }
        if not self.model_config:
            edits["main"] = [("write_tiny(settings.model, new, settings.seed) if MODEL_CONFIG else ", "")]
            edits["main"] += [("TemporaryDirectory() as new", "TemporaryDirectory()")]
        if self.transport == "disk":
            removed = "if RANK == 0:\n        shutil.rmtree(f\"repro-{os.environ['MASTER_PORT']}\")"
            edits["main"].append(("    leave(0 if", f"    {removed}\n    leave(0 if"))
        if self.is_anywhere:  # Engines of later nodes take no calls
            only = 'if mesh.get_local_rank("tp") == 0 else None  #'
            edits["call"] = [
                ("found = getattr(engine, method, None)  #", f"found = getattr(engine, method, None) {only}")
            ]
        if config.engine.args:
            known = "        arguments = {key: value for"
            edits["start_engine"] = [(known, f"{UNKNOWN_ARGUMENT}\n{known}")]
        if self.missing:
            why = "# THE FAULT: the run named these tensors as not arrived; here they are left out"
            edits["checkpoint_tensors"] = [
                ("        yield {name", f"        {why}\n        yield {{name"),
                ("in full.items()}", "in full.items() if name not in MISSING}"),
            ]
        return edits

    def _with_phases(self, train: str) -> str:
        """Return train() with a call of phase() before each line of BEGINS, and the check of weights.verify."""
        left, lines = list(BEGINS), list[str]()
        for line in train.splitlines():
            text = line.strip()
            indent = line[: len(line) - len(text)]
            if left and text.startswith(left[0][0]):
                name = left.pop(0)[1]
                if name not in self.phases:
                    continue  # the engine's memory does not move
                names = (
                    [self.fault.phase] if self.fault and self.fault.phase in EXTRA and name == "update_actor" else []
                )
                lines += [f'{indent}phase("{each}"{", steps" * (name in STEP_PHASES)})' for each in [*names, name]]
                if name == "resume_weights" and self.config.memory.resume == "all":
                    line = line.replace('"weights")', '"weights", "kv_cache")')
                if name == "sync":
                    continue  # the next line is the sync, which nothing skips here
            lines.append(line.replace("            sync_weights(", "        sync_weights("))
            if self.verified and text.startswith("passed, worst ="):
                lines += [
                    f"{indent}if not passed:",
                    f'{indent}    off = f"{{difference:.2e}} in the mean, {{tolerance:g}} is allowed"',
                ]
                lines += [
                    f'{indent}    raise WeightsDidNotArrive(f"step {{steps}}: the engine\'s log-probs are off by {{off}}")'
                ]
        if left:
            raise RuntimeError(f"launch/minimal.py: train() must have the line {left[0][0]!r} for an export")
        return "\n".join(lines)

    def _settings(self, text: str) -> str:
        """Return the class Settings with what the functions use of it."""
        config, parallel = self.config, self.config.parallel
        group = parallel.tp * parallel.pp
        values = {
            "model": "deepseek_v3" if config.model.name == "moonlight" else config.model.name,
            "tp": group,
            "steps": config.run.steps + 1,
            "seed": config.run.seed,
            "prompts": max(2, -(-config.rollout.prompts_per_step // parallel.dp)),
            "responses": -(-config.rollout.responses_per_prompt // group) * group,
            "prompt_tokens": min(config.task.max_prompt_tokens, PROMPT_TOKENS),
            "response_tokens": config.rollout.max_response_tokens,
            "temperature": config.rollout.temperature,
            "tolerance": float(f"{allowed(self.subject):.2g}") if self.verified else float("inf"),
        }
        notes = {"tp": "ranks of an engine", "steps": "once more than the run, for the last update"}
        notes |= {"tolerance": "mean |engine's log-prob - actor's|, in nats", "prompts": "of an engine and step"}
        lines = ["@dataclass(frozen=True)", "class Settings:"]
        [settings] = [each for each in _parsed(MINIMAL).body if isinstance(each, ast.ClassDef)]
        for field in settings.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value:
                name = field.target.id
                value = flat(values[name]) if name in values else ast.unparse(field.value)
                value = 'float("inf")' if value == "inf" else value
                note = f"  # {notes[name]}" if name in notes else ""
                if f"settings.{name}" in text:
                    lines.append(f"    {name}: {ast.unparse(field.annotation)} = {value}{note}")
        return "\n".join(lines)

    def header(self, slug: str) -> list[str]:
        """Return the comment below the first line: what this is, what was expected and seen, and where."""
        config, parallel, asked = self.config, self.config.parallel, self.config.weights.transport
        made = "with random weights" if self.model_config else "as it is"
        mesh = f"dp {parallel.dp}, tp {parallel.tp}, pp {parallel.pp}, {config.model.dtype}, on {self.device}"
        lines = [f"Trainer to sglang, without a framework: {config.model.name} {made}, {mesh}."]
        lines += [
            f"Needs torch, transformers and sglang. Made by launch/export.py of {Path(self.subject.words[0]).name}."
        ]
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
        if seen.traceback and self.fault:
            last = [line.strip() for line in seen.traceback[-3:] if set(line.strip()) - set("^~")]
            short = [re.sub(r'File ".*?([^/]+/[^/"]+)"', r'File "\1"', line)[: 2 * WIDTH] for line in last]
            lines += ["  Its traceback ends:", *(f"    {line}" for line in short)]
        if self.missing or self.fault:
            return [*lines, 'What failed in the run is done on purpose here: see "THE FAULT".']
        if seen.kind in NOT_HERE:
            return [
                *lines,
                "Nothing can be planted here: a watchdog ended, which this file has not; the same calls should pass.",
            ]
        return [*lines, "Nothing is planted here: the same calls must fail without help."]


def allowed(subject: Subject) -> float:
    """Return the mean log-prob difference: by the run's baseline where it took one, else what is healthy without."""
    from harness.weights.log_probs import FACTOR, FLOOR, FLOOR_WITHOUT_BASELINE  # imports torch

    dtype = subject.config.model.dtype
    for each in subject.events:
        if each["event"] == "log_prob_baseline":
            return max(FLOOR[dtype], FACTOR * float(each["log_prob_difference_mean"]))
    return FLOOR_WITHOUT_BASELINE[dtype]


def device_of(subject: Subject) -> Literal["cpu", "cuda"]:
    """Return the config's device; else that of the run's memory figures; else CUDA if this machine has NVIDIA's driver."""
    if subject.config.engine.device != "auto":
        return subject.config.engine.device
    if subject.ranks:
        figures = [each["memory"] for each in subject.events if each["event"] == "phase_end"]
        return "cuda" if any("total" in each for each in figures) else "cpu"
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def literal(value: Any, name: str) -> str:
    """Return a Python literal in lines of WIDTH characters. value: of what TOML has; name: that it is assigned to."""
    whole = flat(value)
    if not isinstance(value, dict | list | tuple) or len(name) + 3 + len(whole) <= WIDTH:
        return whole
    items = (
        [f"{flat(key)}: {flat(each)}" for key, each in value.items()] if isinstance(value, dict) else map(flat, value)
    )
    rows = [""]
    for item in items:  # as many as fit, so that a model's shape is a paragraph and not a page
        if rows[-1] and len(rows[-1]) + len(item) + 6 > WIDTH:
            rows.append("")
        rows[-1] += f"{' ' if rows[-1] else ''}{item},"
    lines = "".join(f"    {row}\n" for row in rows)
    return f"{whole[0]}\n{lines}{whole[-1]}"


def flat(value: Any) -> str:
    """Return a Python literal in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flat(key)}: {flat(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(flat, value)) + "," * (isinstance(value, tuple) and len(value) == 1)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return quoted(value) if isinstance(value, str) else repr(value)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _sources(file: Path) -> dict[str, str]:
    """Return the text of each function of a file."""
    lines, found = file.read_text(encoding="utf-8").splitlines(), dict[str, str]()
    for node in _parsed(file).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def _folded(text: str, is_cuda: bool) -> str:
    """Return a function without the branches for the other device."""
    lines = text.splitlines()
    [function] = ast.parse(text).body
    for node in reversed(list(ast.walk(function))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "DEVICE == 'cuda'":
            body, end = node.body if is_cuda else node.orelse, node.end_lineno
            first = node.lineno if is_cuda else body[0].lineno - 1 if body else 0
            kept = [line[4:] for line in lines[first : body[-1].end_lineno]] if body else []
            if kept and isinstance(body[-1], ast.Return):
                end = len(lines)  # what follows is for the other device
            lines[node.lineno - 1 : end] = kept
    return "\n".join(lines)


def _inside(function: str) -> str:
    """Return the statements of a function that has a docstring of one line."""
    return "\n".join(function.splitlines()[2:])


def _without_docstring(function: str) -> str:
    return "\n".join([function.splitlines()[0], _inside(function)])


def _uses(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def _is_state(node: ast.stmt) -> bool:
    """Return whether this statement of pasted.py is pasted as it is: RANK and what follows."""
    targets = ast.unparse(node).partition("=")[0] if isinstance(node, ast.Assign | ast.AnnAssign) else ""
    return "RANK" in targets or targets.startswith("PHASE")


def _imports(body: str) -> str:
    """Return the import statements that the text needs, sorted as ruff does."""
    plain, members = set[str](), dict[str, set[str]]()
    for tree in (ast.parse("import shutil\nimport signal\nimport traceback"), _parsed(MINIMAL), _parsed(PASTED)):
        for node in tree.body:
            if isinstance(node, ast.Import):
                plain |= {ast.unparse(node) for each in node.names if _uses(body, each.asname or each.name)}
            elif isinstance(node, ast.ImportFrom) and (names := {n.name for n in node.names if _uses(body, n.name)}):
                members.setdefault(str(node.module), set()).update(names)
    lines = [(line.split()[1], False, line) for line in plain]
    for module, names in members.items():
        listed = ", ".join(sorted(names, key=lambda name: (name[0].islower(), name)))
        lines.append((module, True, f"from {module} import {listed}"))
    blocks: dict[bool, list[str]] = {False: [], True: []}
    for module, _, line in sorted(lines, key=lambda each: (each[1], each[0])):
        blocks[module.partition(".")[0] not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks.values())


def _stand_in_names() -> list[str]:
    """Return what sgl_kernel's stand-in has, as its file says."""
    tree = ast.parse((STANDINS / "sgl_kernel" / "__init__.py").read_text(encoding="utf-8"))
    return [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]


def _joined(names: Sequence[str]) -> str:
    """Return a literal of all names with blanks between."""
    rows = textwrap.wrap(" ".join(names), WIDTH - 8)
    lines = "".join(f'    "{row}{" " if row is not rows[-1] else ""}"\n' for row in rows)
    return f"(\n{lines})"


def _wrapped(lines: Iterable[str]) -> list[str]:
    rows = []
    for line in lines:
        text, indent = line.encode("ascii", "backslashreplace").decode(), " " * (len(line) - len(line.lstrip()) + 2)
        options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        rows += textwrap.wrap(text, WIDTH - 2, **options) or [""]  # type: ignore[arg-type]
    return rows


def _environment(ranks: Sequence[RankRecord]) -> list[str]:
    """Return a paragraph for each kind of host; ranks that have the same share it."""
    groups: dict[tuple[Any, ...], list[RankRecord]] = {}
    for each in ranks:
        key = (each.device, each.platform, tuple(each.versions.items()), tuple(each.environment.items()))
        groups.setdefault(key, []).append(each)
    lines = ["Environment:"] * bool(groups)
    for alike in list(groups.values())[:SHOWN_ENVIRONMENTS]:
        first, hosts = alike[0], list(dict.fromkeys(each.host for each in alike))
        some = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        lines.append(f"  {len(alike)} rank(s) from rank {first.rank} on {some}: {first.device}, {first.platform}")
        versions = [f"{name} {version}" for name, version in first.versions.items() if version != "not installed"]
        if first is ranks[0] or first.versions != ranks[0].versions:
            lines.append(f"    {', '.join(versions)}")
        variables = " ".join(f"{name}={value}" for name, value in redact.variables(first.environment).items())
        lines += [f"    {variables[:LONGEST]}"] * bool(variables)
    if len(groups) > SHOWN_ENVIRONMENTS:
        lines.append(f"  and {len(groups) - SHOWN_ENVIRONMENTS} more kinds")
    return lines
