"""The observers of every run that the launch scripts start, in the order in which a run calls them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from harness.config.schema import Config
from harness.runtime.errors import say
from harness.runtime.observer import Observer, RunContext
from harness.tools.agreement import Agreement
from harness.tools.environment_file import EnvironmentFile
from harness.tools.hosts.phase_gate import PHASE_SOCKET, EmulatedHost
from harness.tools.live_line import LiveLine
from harness.tools.picture import PlacementPicture
from harness.tools.rewards.more_rewards import RewardMaker
from harness.tools.tiny_models import TinyModelMaker
from harness.tools.trackers.trackers import TrackerWriter
from harness.tools.verification.verification_observers import ReadBack
from harness.tools.watchdog.client import WatchdogObserver

REPORT_SECONDS = 60.0  # how long the reports may take; the run has passed by then
ROOT = Path(__file__).resolve().parents[2]
ENGINE_METHODS = (
    "generate", "release_memory_occupation", "resume_memory_occupation", "flush_cache", "begin_weight_update",
    "update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_disk", "end_weight_update",
)  # fmt: skip
"""Calls of sglang.Engine that a step makes, as SGLang names them."""


class EngineCalls(Observer):
    """Write an event of each call of an sglang.Engine, on the rank that makes it, and of what each rank asks its scheduler.

    As calls return: where a process ends inside one, its phase is what remains.
    """

    def met(self, run: RunContext) -> None:
        self.fact = run.events.fact

    def built(self, name: str, part: Any) -> None:
        if name != "engine":
            return
        part.ask = self.timed("ask", part.ask)
        for method in ENGINE_METHODS if part.is_head else ():
            if hasattr(part.inner, method):
                setattr(part.inner, method, self.timed(method, getattr(part.inner, method)))

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call; each use of it writes its name, seconds, and whether it returned."""

        @wraps(call)
        def run(*arguments: Any, **named: Any) -> Any:
            started, ok = time.monotonic(), False
            try:
                result = call(*arguments, **named)
                ok = True
                return result
            finally:
                with suppress(OSError):  # on a full disk the call's own failure must be raised
                    self.fact("engine_call", call=name, seconds=time.monotonic() - started, ok=ok)

        return run


class MemoryFigures(Observer):
    """Have a run's events say what each phase took of memory."""

    def met(self, run: RunContext) -> None:
        from harness.tools.memory_gauge import MemoryGauge  # imports torch

        on_gpu = run.world.device.type == "cuda"
        run.events.gauge = MemoryGauge(run.world.device.index if on_gpu else None, run.world.engine_gpu)


class ShippedEngine(Observer):
    """engine.implementation = "sglang": has the run use the VerlEngine that sglang ships."""

    def met(self, run: RunContext) -> None:
        from harness.tools.shipped_verl_engine import ShippedVerlEngine  # imports torch

        run.classes["engine"] = ShippedVerlEngine


class ReportWriter(Observer):
    """Have the reports of a run that passed written, by rank 0. Those of a run that failed are the watchdog's."""

    folder: Path | None = None

    def met(self, run: RunContext) -> None:
        if run.world.rank == 0:
            self.folder, self.say = run.folder, run.events.say

    def passed(self) -> None:
        if self.folder:
            self.say(f"report: {self.folder}/report.html")

    def finished(self, code: int) -> None:
        """Write the reports in a process of their own: whatever happens in it, the run has passed."""
        if not (self.folder and code == 0):
            return
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "harness.tools.report.write_reports", str(self.folder)]
        try:
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=REPORT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"no report ({error}): {sys.executable} {ROOT}/launch/report.py {self.folder} writes it\n")


def standard_observers(config: Config) -> list[Observer]:
    """Return what writes and shows, the watchdog, and what was asked for: faults of emulated hosts, and injected faults.

    A late rank comes before the watchdog, which must not know yet of the phase; the others after it, so that a rank that is
    about to be killed has reported its phase.
    """
    watchdog = WatchdogObserver()
    path = os.environ.get(PHASE_SOCKET)
    emulated = [EmulatedHost(path, watchdog.flush)] if path else []
    trackers = [TrackerWriter(config.trackers.names)] if config.trackers.names else []
    engines = [ShippedEngine()] if config.engine.implementation == "sglang" else []
    writers = [
        *engines,
        MemoryFigures(),
        ReadBack(),
        PlacementPicture(),
        EnvironmentFile(),
        TinyModelMaker(),
        RewardMaker(),
        ReportWriter(),
        EngineCalls(),
        *trackers,
        LiveLine(),
    ]
    if config.rollout.save:
        from harness.tools.saved_rollouts import RolloutWriter  # imports torch

        writers.append(RolloutWriter())
    if not config.run.inject:
        return [*writers, watchdog, *emulated, Agreement()]
    from harness.tools.inject import Injector, LateRank

    injector = Injector(watchdog.injected)
    return [*writers, LateRank(injector), watchdog, *emulated, injector, Agreement()]
