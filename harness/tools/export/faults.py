"""What a repro must do on purpose to fail as the run did, where the run's own code, which is not in it, failed."""

import builtins
import re
from dataclasses import dataclass

from harness.tools.export.literal import quoted
from harness.tools.export.subject import RunEnd

ENGINE = ("EngineFailed", "EngineRefused", "OutOfMemoryError", "CUDAError")
"""Errors that the same calls on the same engine raise by themselves."""
ARRIVAL = ("WeightsDidNotArrive", "NoBaseline")
PACKAGE = re.compile(r'^\s*File ".*[/\\](?:sglang|transformers)[/\\]')
STEP_PHASES = ("resume_weights", "sync", "resume_kv_cache", "generate", "release", "old_log_probs", "update_actor")
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
"""Phases that a repro has not, and where it comes to their place."""
EXTRA = ("reference_log_probs", "values", "advantages", "update_critic", "free_caches")
"""Phases of learning: a repro has the one that is needed."""
OF_TORCHRUN = ("launcher", "told")
"""Kinds of failures of torchrun, which one of its ranks can do to it."""
NOT_HERE = ("watchdog",)
"""Kinds of failures of what a repro has not."""
FOREVER = 10**9
LONGEST = 800
"""Characters of a message that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """A statement that some ranks execute as a phase begins."""

    ranks: tuple[int, ...]
    phase: str
    step: int | None
    statement: str
    why: str
    error_class: str = ""
    """Of the run's own, to be defined."""


def missing_tensors(seen: RunEnd | None) -> tuple[str, ...]:
    """Checkpoint names of the tensors that did not arrive, as far as the run named them."""
    if seen is None or _type(seen.error) not in ARRIVAL:
        return ()
    listed = re.split(r"(?:from the trainer's|other weights|what was sent|what the engine holds): ", seen.error)[-1]
    names = []
    for part in listed.split("; "):
        inside = re.search(r"\(([^)]*)\)", part)
        words = inside[1].split(", ") if inside else part.split()[:1]
        names += [word.strip(",;") for word in words]
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[\w]+(\.[\w]+)+", name)))


def plant_of(seen: RunEnd | None, phases: tuple[str, ...]) -> Plant | None:
    """None where the same calls must fail by themselves, or nothing failed. phases: that the repro has."""
    if seen is None or seen.code in (0, None) or missing_tensors(seen) or not seen.ranks:
        return None
    if "has no such engine argument" in seen.error:
        return None
    statement, why, error_class = _statement(seen)
    if not statement:
        return None
    ranks = seen.ranks[:1] if seen.kind in OF_TORCHRUN else seen.ranks
    phase = place_of(seen.phase, phases)
    step = (0 if seen.step is None else seen.step) if phase in (*STEP_PHASES, *EXTRA) else None
    return Plant(ranks=ranks, phase=phase, step=step, statement=statement, why=why, error_class=error_class)


def place_of(phase: str, phases: tuple[str, ...]) -> str:
    """The repro's phase for one of the run."""
    phase = ELSEWHERE.get(phase, "sync" if phase.startswith("verify_") else phase)
    if phase in phases or phase in EXTRA:
        return phase
    order = ("meet", "start_engine", "first_release", "build_trainer", *STEP_PHASES, "shutdown")
    later = order[order.index(phase) :] if phase in order else order
    return next(each for each in later if each in phases)


def _statement(seen: RunEnd) -> tuple[str, str, str]:
    """The statement, what it stands for, and the class that it needs; empty where nothing is planted."""
    if seen.kind == "deadline":
        return f"time.sleep({FOREVER})", "in the run these ranks did not go on from here", ""
    if seen.kind in NOT_HERE:
        return "", "", ""
    if seen.kind in OF_TORCHRUN:
        got = re.search(r"\bgot (SIG[A-Z]+)\b", seen.error)
        return (
            f"os.kill(os.getppid(), signal.{got[1] if got else 'SIGKILL'})",
            "in the run torchrun itself got this",
            "",
        )
    if seen.kind == "stopped" and (process := re.match(r"engine process (.*) \(pid \d+\)", seen.error)):
        engine = '__import__("psutil").Process().children(recursive=True)'
        statement = f"[each.suspend() for each in {engine} if each.name() == {quoted(process[1])}]"
        return statement, "in the run this process of the engine was stopped", ""
    if seen.kind in ("died", "ended", "lost", "stopped"):
        signal = "SIGSTOP" if seen.kind == "stopped" else "SIGKILL"
        if found := re.search(r"\bSIG[A-Z]+\b", seen.error):
            signal = found[0]
        if found := re.search(r"ended with exit code (\d+)", seen.error):
            return f"leave({found[1]})", "in the run this process ended so, without a word", ""
        return f"os.kill(os.getpid(), signal.{signal})", "in the run this process ended so, or its host did", ""
    message = seen.error.partition(": ")[2]
    if seen.code in (2, 125):
        return f"leave({seen.code}, {quoted(f'error: {message[:LONGEST]}')} + chr(10))", "so ended the run", ""
    short = _type(seen.error)
    if short in ENGINE or any(PACKAGE.match(line) for line in seen.traceback) or not short.isidentifier():
        return "", "", ""
    is_builtin = isinstance(getattr(builtins, short, None), type) and issubclass(getattr(builtins, short), Exception)
    why = "raised by code of the run that is not in this file; its traceback is above"
    text = quoted(message[:LONGEST])
    if short in ARRIVAL:
        return f"raise {short}({text})", why, "" if short == ARRIVAL[0] else short
    return f"raise {short}({text})", why, "" if is_builtin else short


def _type(error: str) -> str:
    """WeightsDidNotArrive of "WeightsDidNotArrive: step 0: ..."."""
    return error.partition(":")[0].rpartition(".")[2]
