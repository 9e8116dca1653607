"""What a program must do on purpose to fail as the run did, where code of the run failed that is not in the program."""

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.tools.export.subject import RunEnd

ENGINE = ("EngineFailed", "EngineRefused", "OutOfMemoryError", "CUDAError")
"""Errors that the same calls on the same engine raise without help."""
ARRIVAL = ("WeightsDidNotArrive", "NoBaseline")
PACKAGE = re.compile(r'^\s*File ".*[/\\](?:sglang|transformers)[/\\]')
STEP_PHASES = ("resume_weights", "sync", "resume_kv_cache", "generate", "release", "old_log_probs", "update_actor")
ORDER = ("meet", "start_engine", "first_release", "build_trainer", *STEP_PHASES, "shutdown")
ELSEWHERE = {
    "inputs": "meet",
    "import_sglang": "start_engine",
    "load_baseline": "sync",
    "verify_baseline": "sync",
    "verify_log_probs": "old_log_probs",
    "verify_movement": "update_actor",
    "find_suspects": "old_log_probs",
    "readback": "sync",
    "bench": "sync",
}
"""Phases of a run that a program does not have -> its phase in their place."""
EXTRA = ("reference_log_probs", "values", "advantages", "update_critic", "free_caches")
"""Phases of learning: a program has the one that is needed."""
OF_TORCHRUN = ("launcher", "told")
"""Kinds of failures of torchrun, which one of its ranks can cause."""
NOT_HERE = ("watchdog",)
"""Kinds of failures of what a program does not have."""
FOREVER = 10**9
LONGEST = 800
"""Characters of a message that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedFault:
    """A statement that some ranks execute as a phase begins."""

    ranks: tuple[int, ...]
    phase: str
    step: int | None
    statement: str
    why: str
    error_class: str = ""
    """Of the run's own, to be defined."""


def missing_tensors(seen: RunEnd | None) -> tuple[str, ...]:
    """Return the checkpoint names of the tensors that did not arrive, as far as the run named them."""
    if seen is None or _class_name(seen.error) not in ARRIVAL:
        return ()
    listed = re.split(r"(?:from the trainer's|other weights|what was sent|what the engine holds): ", seen.error)[-1]
    names = []
    for part in listed.split("; "):
        inside = re.search(r"\(([^)]*)\)", part)
        names += [word.strip(",;") for word in (inside[1].split(", ") if inside else part.split()[:1])]
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[\w]+(\.[\w]+)+", name)))


def planted_fault(seen: RunEnd | None, phases: Sequence[str]) -> PlantedFault | None:
    """Return None where the same calls must fail without help, or nothing failed. phases: those of the program."""
    if seen is None or seen.code in (0, None) or missing_tensors(seen) or not seen.ranks:
        return None
    if "has no such engine argument" in seen.error or not (found := _statement(seen)):
        return None
    statement, why, *error_class = found
    phase = place_of(seen.phase, phases)
    return PlantedFault(
        ranks=seen.ranks[:1] if seen.kind in OF_TORCHRUN else seen.ranks,
        phase=phase,
        step=seen.step or 0 if phase in (*STEP_PHASES, *EXTRA) else None,
        statement=statement,
        why=why,
        error_class="".join(error_class),
    )


def place_of(phase: str, phases: Sequence[str]) -> str:
    """Return the program's phase for one of the run."""
    phase = ELSEWHERE.get(phase, "sync" if phase.startswith("verify_") else phase)
    if phase in phases or phase in EXTRA:
        return phase
    later = ORDER[ORDER.index(phase) :] if phase in ORDER else ORDER
    return next(each for each in later if each in phases)


def _statement(seen: RunEnd) -> tuple[str, ...]:
    """Return the statement, what it stands for, and the class that it needs, if any; empty where nothing is planted."""
    if seen.kind == "deadline":
        return f"time.sleep({FOREVER})", "in the run these ranks did not continue from here"
    if seen.kind in NOT_HERE:
        return ()
    signal = found[0] if (found := re.search(r"\bSIG[A-Z]+\b", seen.error)) else "SIGKILL"
    if seen.kind in OF_TORCHRUN:
        signal = signal if f"got {signal}" in seen.error else "SIGKILL"
        return f"os.kill(os.getppid(), signal.{signal})", "in the run torchrun itself got this"
    if seen.kind == "stopped":
        if process := re.match(r"engine process (.*) \(pid \d+\)", seen.error):
            engine = '__import__("psutil").Process().children(recursive=True)'
            statement = f"[each.suspend() for each in {engine} if each.name() == {quoted(process[1])}]"
            return statement, "in the run this process of the engine was stopped"
        signal = found[0] if found else "SIGSTOP"
    if seen.kind in ("died", "ended", "lost", "stopped"):
        if code := re.search(r"ended with exit code (\d+)", seen.error):
            return f"leave({code[1]})", "in the run this process ended so, without an error"
        return f"os.kill(os.getpid(), signal.{signal})", "in the run this process ended so, or its host did"
    message = seen.error.partition(": ")[2][:LONGEST]
    if seen.code in (2, 125):
        return f"leave({seen.code}, {quoted(f'error: {message}')} + chr(10))", "so ended the run"
    name = _class_name(seen.error)
    if name in ENGINE or any(PACKAGE.match(line) for line in seen.traceback) or not name.isidentifier():
        return ()
    builtin = getattr(builtins, name, None)
    is_known = name == ARRIVAL[0] or (isinstance(builtin, type) and issubclass(builtin, Exception))
    why = "raised by code of the run that is not in this file"
    return f"raise {name}({quoted(message)})", why, "" if is_known else name


def _class_name(error: str) -> str:
    """Return WeightsDidNotArrive of "WeightsDidNotArrive: step 0: ..."."""
    return error.partition(":")[0].rpartition(".")[2]


def quoted(text: str) -> str:
    """Return a string literal: ASCII, in double quotes unless others need fewer backslashes."""
    plain = ascii(text)
    if plain[0] == '"' or '"' in plain:
        return plain
    return '"' + plain[1:-1].replace("\\'", "'") + '"'
