"""Runs a case's variants, each in a session of its own, and ends whatever they started."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.runtime.processes import descendants, end_processes
from harness.tools.hosts import kernel
from harness.tools.repro.case import Case, Variant, module_name
from harness.tools.repro.verdict import Outcome, shows
from harness.tools.watchdog.shared_memory import SharedMemory

REPOSITORY = Path(__file__).resolve().parents[3]
END_SECONDS = 3.0
"""From SIGTERM to SIGKILL, for what a variant has left running."""
POLL_SECONDS = 0.5
LINGER_SECONDS = 15.0
"""What a variant gets to end by itself once its output shows the whole signature: many a dead scheduler leaves a parent
that waits for ever."""


def command(slug: str, variant: Variant) -> list[str]:
    """From the repository's root."""
    return [sys.executable, "-m", module_name(slug), variant]


def run(slug: str, case: Case, variant: Variant) -> Outcome:
    """From the main thread of a process that has no other children: orphans become its own, and all of them are ended, and
    what they left in /dev/shm goes."""
    kernel.adopt_orphans()
    memory = SharedMemory()
    with tempfile.TemporaryDirectory(prefix="repro-") as folder:
        log = Path(folder) / "output"
        began = time.monotonic()
        with log.open("wb") as target:
            process = subprocess.Popen(
                command(slug, variant),
                cwd=REPOSITORY,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = _wait(process, case, log, memory)
        finally:
            seconds = time.monotonic() - began
            end_processes(descendants(), patience_seconds=END_SECONDS)
            process.wait()
            memory.remove()
        return Outcome(exit_code=code, output=read(log), seconds=seconds)


def environment(folder: str) -> dict[str, str]:
    """A launcher's variables would make the variant a rank of its run."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "HARNESS_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    path = [str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": folder}


def _wait(process: subprocess.Popen[bytes], case: Case, log: Path, memory: SharedMemory) -> int | None:
    """Its exit code; None where it was not over in time, nor LINGER_SECONDS after it had shown the whole signature."""
    deadline = time.monotonic() + case.seconds
    shown = False
    while (now := time.monotonic()) < deadline:
        memory.look(descendants())
        try:
            return process.wait(min(POLL_SECONDS, deadline - now))
        except subprocess.TimeoutExpired:
            if case.signature and not case.number and not shown and shows(case, read(log)):
                shown, deadline = True, min(deadline, time.monotonic() + LINGER_SECONDS)
    return None


def read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")
