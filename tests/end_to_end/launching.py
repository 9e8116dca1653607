"""Real torchrun jobs for the tests: started in a session of their own, watched, and accounted for to the last
process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from harness.runtime.processes import is_alive
from harness.tools.repro.local_ranks import free_port
from harness.tools.run_tree import die_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "HARNESS_TEST_JOB"
QUICKSTART = "configs/cpu/quickstart.toml"
SHARING_GPUS = [
    *["--engine.args.enable_memory_saver", "false", "--engine.args.max_total_tokens", "16384"],
    *["--engine.args.mem_fraction_static", "0.9"],
]
"""For runs that share their GPUs: no memory saver, which judges a release by the free bytes of the whole GPU, and a KV
cache of a fixed size, where an engine would take a share of what is free. What others take while an engine loads counts
against its share."""
DP_AND_EP = [
    *["--engine.args.enable_dp_attention", "true", "--engine.args.dp_size", "2", "--engine.args.ep_size", "2"],
    *["--engine.args.sleep_on_idle", "false"],
    *["--run.steps", "2", "--rollout.prompts_per_step", "8", "--rollout.responses_per_prompt", "2"],
    *["--actor.minibatch_size", "16", "--actor.ppo_epochs", "1"],
]
"""An engine of two ranks with DP attention and expert parallelism, and two small steps. A scheduler that sleeps when
idle looks only each second for what its peers wait for, so that with DP attention each call takes a second; one that does
not sleep takes the cores from the trainer."""
Launcher = Literal["forked", "plain"]
LAUNCHERS: dict[Launcher, list[str]] = {"forked": ["launch/torchrun.py"], "plain": ["-m", "torch.distributed.run"]}
"""Python's arguments: ranks that are forked from one import, and torchrun's own. The first is sooner at a run's first
step, the second where a rank ends before it has imported SGLang."""
WAYS: dict[Launcher, list[str]] = {"forked": [], "plain": ["--engine.start", "spawn"]}
"""What else makes every process of a run a Python of its own, or forks it."""


def run_script(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A launch script by itself, with no environment of ours in reach, to its end."""
    return subprocess.run(
        [sys.executable, script, *words],
        cwd=REPOSITORY,
        env={"PATH": "", "HOME": "/nonexistent"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@dataclass
class Job:
    """A torchrun of launch/ppo.py, or of another script of ours."""

    folder: Path
    """Run directory."""
    ranks: int
    arguments: list[str]
    script: str = "launch/ppo.py"
    launcher: Launcher = "forked"
    agent: int = 0
    """Which of several launchers of one run this is."""
    meeting: list[str] = field(default_factory=lambda: ["--nnodes=1", f"--master-port={free_port()}"])
    """How torchrun finds the others."""
    prefix: list[str] = field(default_factory=list)
    """A command that runs torchrun."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the job gets in addition."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    seen: set[psutil.Process] = field(default_factory=set)
    """Every descendant that was ever looked at: setproctitle overwrites a scheduler's environment, mark included."""

    def start(self) -> "Job":
        self.log = self.folder.with_suffix(f".{self.agent}.log")
        command = [
            *[*self.prefix, sys.executable, *LAUNCHERS[self.launcher], *self.meeting, f"--nproc-per-node={self.ranks}"],
            *[self.script, *self.arguments, "--run.dir", str(self.folder)],
        ]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"} | self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # pytest may be killed, and runs no teardown then
            )
        return self

    def wait(self, seconds: float = 600) -> int:
        """The exit code; kills everything and fails the test when it takes longer."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"no end after {seconds} s:\n{self.output()[-4000:]}")
            self.look()
            time.sleep(0.3)
        return self.process.returncode

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def mistake(self) -> str:
        """The sentence of a job that ended by one, the last line of the screen.

        torchrun's own report makes it two: at once, and below the report. What writes the last one outlives torchrun by
        a moment.
        """
        times, end = 1 if self.launcher == "forked" else 2, time.monotonic() + 10
        while len(said := [line for line in self.output().splitlines() if line.startswith("error:")]) < times:
            assert time.monotonic() < end, self.output()[-4000:]
            time.sleep(0.1)
        assert said == [said[0]] * times and self.output().splitlines()[-1] == said[0]
        if self.launcher == "forked":
            assert self.process.returncode == 2
        else:
            assert "exitcode  : 2" in self.output()
        return said[0]

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        file = self.folder / "events" / f"rank{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_phase(self, name: str, seconds: float = 300, step: int | None = None) -> None:
        """Return when rank 0 has entered the phase, of this step or of any."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begun = [event for event in self.events() if event["event"] == "phase_start" and event["phase"] == name]
            if any(step in (None, event["step"]) for event in begun):
                return
            assert self.process.poll() is None, f"it ended before {name}:\n{self.output()[-4000:]}"
            self.look()
            time.sleep(0.2)
        self.kill()
        raise AssertionError(f"{name} did not start in {seconds} s:\n{self.output()[-4000:]}")

    def look(self) -> None:
        """Remember this job's processes: descendants, and whatever else inherited its mark."""
        with contextlib.suppress(psutil.NoSuchProcess):  # torchrun may just have ended
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    self.seen.add(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it ended while we looked, or is not ours

    def processes(self) -> list[psutil.Process]:
        """Those of this job's processes that live."""
        self.look()
        return [process for process in self.seen if is_alive(process)]

    def rank_processes(self) -> list[psutil.Process]:
        """The ranks, in order, without torchrun's other children: each rank leads a session."""
        children = psutil.Process(self.process.pid).children()
        ranks = [child for child in children if os.getsid(child.pid) == child.pid]
        return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))

    def left_behind(self, seconds: float = 15) -> list[str]:
        """Names of processes that still live this long after the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.processes():
            time.sleep(0.2)
        return [process.name() for process in self.processes()]

    def kill(self) -> None:
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


def run(
    folder: Path,
    ranks: int,
    *arguments: str,
    script: str = "launch/ppo.py",
    launcher: Launcher = "forked",
    seconds: float = 600,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Start a job and wait for its end; look at job.process.returncode."""
    job = Job(
        folder=folder,
        ranks=ranks,
        arguments=list(arguments),
        script=script,
        launcher=launcher,
        environment=dict(environment or {}),
    ).start()
    job.wait(seconds)
    return job
