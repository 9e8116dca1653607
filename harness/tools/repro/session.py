"""Several cases, each run by a process of its own, as many at a time as there are GPUs for them: an engine takes a GPU where
there is one, so on a machine without GPUs they run one after the other."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.tools.hosts import kernel
from harness.tools.repro.case import Case
from harness.tools.repro.result import Result, file_of, read_result
from harness.tools.repro.runner import REPOSITORY
from harness.tools.repro.verdict import EXIT_CODES, Kind

COMMAND = REPOSITORY / "launch" / "repro.py"


class Devices:
    """GPUs that are free. On a machine without any, one case at a time has it all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._free = list(names)
        self._change = threading.Condition()
        self._alone = threading.Lock()
        self.there = len(names)

    def take(self, count: int) -> list[str]:
        """Waits for them. A case without GPUs waits for the others of its kind."""
        if count == 0:
            self._alone.acquire()
            return []
        with self._change:
            self._change.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give_back(self, names: Sequence[str]) -> None:
        if not names:
            self._alone.release()
            return
        with self._change:
            self._free += names
            self._change.notify_all()


def run_all(cases: Mapping[str, Case], folder: Path, gpus: Sequence[str], options: Sequence[str]) -> dict[str, Result]:
    """Results by slug, each said when it is there; folder has one file for each. Those of most GPUs begin, since one that
    waits for two would wait for all others."""
    devices = Devices(gpus)
    order = sorted(cases, key=lambda slug: -cases[slug].gpus(devices.there))
    with ThreadPoolExecutor(max_workers=max(1, len(gpus)) + 1) as pool:
        done = pool.map(lambda slug: (slug, _run_one(slug, cases[slug], folder, devices, options)), order)
        return dict(sorted(done))


def exit_code(results: Mapping[str, Result]) -> int:
    """Of all of them, as of one: 1 any was reproduced; else 125 any could not run, or proved nothing; else 0."""
    codes = {result.exit_code for result in results.values()}
    return 1 if 1 in codes else max(codes, default=0)


def counted(results: Mapping[str, Result]) -> str:
    """How many of each verdict."""
    verdicts = [result.verdict for result in results.values()]
    kinds: list[Kind] = list(EXIT_CODES)
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds if kind in verdicts)


def _run_one(slug: str, case: Case, folder: Path, devices: Devices, options: Sequence[str]) -> Result:
    gpus = devices.take(min(case.gpus(devices.there), devices.there))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    file_of(folder, slug).unlink(missing_ok=True)  # of an earlier run
    command = [sys.executable, str(COMMAND), "run", slug, "--json", str(folder), *options]
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=lambda: kernel.die_with_parent(signal.SIGTERM),
        )
    finally:
        devices.give_back(gpus)
    result = read_result(folder, slug) if file_of(folder, slug).is_file() else _no_result(slug, ended)
    seconds = sum(each.seconds for each in result.variants.values())
    print(f"{result.verdict:<15} {slug:<32} {seconds:5.0f} s  {result.sentence}", flush=True)
    return result


def _no_result(slug: str, ended: subprocess.CompletedProcess[str]) -> Result:
    """Where launch/repro.py itself failed, or was killed."""
    last = (ended.stderr.strip().splitlines() or ["no word of why"])[-1]
    sentence = f"the run ended with exit code {ended.returncode} and no result: {last}"
    return Result(
        slug=slug,
        verdict="proves nothing",
        exit_code=EXIT_CODES["proves nothing"],
        sentence=sentence,
        device="",
        versions={},
        variants={},
    )
