"""Run torchrun so that the imports of this host's ranks begin at once, and are made only once where they can be
shared.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from harness.config.layers import ConfigError
from harness.rollout.early_start import CPU_MODULES, ENGINE_MODULES, expected_node, start_early
from harness.runtime.cpu_standins import no_gpu
from harness.runtime.fork_server import ForkedChild, ForkServer, ServerGone, Task, as_written
from harness.tools import folded_torchrun, kernel_caches
from harness.tools.command_line import parse
from harness.tools.environments import REPOSITORY

NUMBERS = {
    "--nproc-per-node": (r"0*[1-9]\d*|auto|cpu|gpu|xpu", "a number of ranks, auto, cpu, gpu or xpu"),
    "--nnodes": (r"0*[1-9]\d*(:0*[1-9]\d*)?", "a number of hosts, or the least and the most as 1:4"),
}
"""Options of torchrun, what they take, and the same in words."""
JOBS = [REPOSITORY / "launch" / name for name in ("ppo.py", "mismatch.py")]
"""The scripts whose ranks need not wait for their command line to be read before they import anything."""
WITHOUT_ENGINE = ("doctor.py", "repro.py")
"""Scripts whose ranks import no SGLang on the way to their work."""
LOOK_SECONDS = 0.05
RANK_MODULES = ("harness.run", "harness.tools.observers", "harness.train")


class ForkedRank(ForkedChild):
    """A rank that was forked, in the place of the subprocess.Popen that torchrun keeps for it."""

    def __init__(
        self, server: ForkServer, words: Sequence[str], environment: Mapping[str, str], output: Any, error: Any
    ):
        """Fork a rank that runs a script. words: the script and its arguments. output, error: files, or None for
        ours.
        """
        streams = [0, output.fileno() if output else 1, error.fileno() if error else 2]
        script = os.fsencode("\0".join(words))
        task = Task(f"{__name__}:run_script", script, environment, new_session=True, gets_server=True)
        super().__init__(server.fork(task, streams), sentinel=-1)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the rank has ended. Raise TimeoutExpired.

        Look now and then, as subprocess does. A rank that is waited for at the moment of its end has been forgotten by
        the kernel before the watchdog sees how it ended.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank (pid {self.pid})", timeout or 0.0)
            time.sleep(LOOK_SECONDS)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the rank has been waited for."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run_script(words: bytes, descriptors: Sequence[int]) -> None:
    """Run a script with its arguments as `python -u` does, in the process that was forked for it."""
    sys.argv = os.fsdecode(words).split("\0")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True, line_buffering=True)  # type: ignore[union-attr]
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    _show_as(sys.argv)
    script = os.path.abspath(sys.argv[0])
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__loader__ = script, SourceFileLoader("__main__", script)
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)
    except Exception as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _show_as(words: Sequence[str]) -> None:
    """Show this process in lists of processes as the script that it runs."""
    try:
        from setproctitle import setproctitle
    except ModuleNotFoundError:  # SGLang needs it, older releases may not
        return
    title = os.fsencode(" ".join([sys.executable, "-u", *words]))
    setproctitle(title.decode(errors="replace"))  # a file's name need not be UTF-8
    Path("/proc/self/comm").write_text("python", encoding="ascii")  # which setproctitle cuts out of the title


def script_of(words: Sequence[str]) -> Sequence[str]:
    """Return the script and its arguments if torchrun's command for a rank is `python -u SCRIPT ...`, else nothing."""
    is_script = len(words) > 2 and words[0] == sys.executable and words[1] == "-u" and words[2].endswith(".py")
    return words[2:] if is_script else ()


def check_numbers(words: Sequence[str]) -> None:
    """Raise ConfigError for a number of ranks or hosts that torchrun cannot read: it needs seconds to say so."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            return
        option, equals, value = word.partition("=")
        wanted = NUMBERS.get(option.replace("_", "-"))
        given = value if equals else following
        if wanted and not re.fullmatch(wanted[0], given):
            raise ConfigError(f"{option} must be {wanted[1]}, got {given!r}")


def run_torchrun() -> int:
    """Start the imports, and run torchrun on this process's arguments meanwhile. Return the exit code.

    torchrun's own output goes to a file in the run directory (see folded_torchrun).
    """
    with folded_torchrun.Launch.open("importing torch, transformers and SGLang") as launch:
        servers = start_ranks_early(sys.argv[1:]) if not no_gpu() else start_ranks_server(sys.argv[1:])
        with launch.imports():
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
            from torch.distributed.run import main as torchrun

        launch.starting.importing = False
        handler = subprocess_handler.SubprocessHandler
        start_python = handler._popen

        def start_rank(self: Any, words: Sequence[str], environment: dict[str, str]) -> Any:
            script = script_of(words)
            server = servers[min(self.local_rank_id, len(servers) - 1)] if script and servers else None
            why = ""
            try:
                if server and not server.used_up:
                    why = server.imported().obstacle(environment, as_written)
                    if not why:
                        return ForkedRank(server, script, environment, self._stdout, self._stderr)
            except ServerGone as error:
                # Without the exception's words: a rank that needs the import shows them, and in the log of any other
                # they would be taken for a failure.
                why = str(error).partition(":")[0]
            finally:
                launch.started()
            if why:
                print(
                    f"local rank {self.local_rank_id} starts as torchrun starts it: {why}", file=sys.stderr, flush=True
                )
            return start_python(self, tuple(words), environment)

        with patch.object(handler, "_popen", start_rank):
            return launch.run(torchrun, sys.argv[1:])


def start_ranks_server(words: Sequence[str]) -> list[ForkServer]:
    """Start the process from which all ranks of a host without a GPU are forked, with all that they and their engines
    need; none for a script that has no engine. words: torchrun's arguments.
    """
    if Path(next(iter(ranks_and_script(words)[1]), "")).name in WITHOUT_ENGINE:
        return []
    os.environ.update(kernel_caches.variables(os.environ))
    print("importing torch, transformers and SGLang, once for all ranks of this host", flush=True)
    return [ForkServer.start([*RANK_MODULES, *CPU_MODULES], os.environ)]


def start_ranks_early(words: Sequence[str]) -> list[ForkServer]:
    """Start a process for each rank of one of JOBS, if this host runs them all; none if torchrun is to start them.

    words: torchrun's arguments. An import of SGLang initializes CUDA, which a forked process cannot use. So each
    process becomes the rank itself, and those that will build an engine start its processes first.
    """
    ranks, script = ranks_and_script(words)
    if not ranks or not script or Path(script[0]).resolve() not in JOBS:
        return []
    os.environ.update(kernel_caches.variables(os.environ))
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        config = parse(script[1:]).config
    except ValueError:  # which the ranks report
        return []
    servers = []
    for rank in range(ranks) if config.engine.device != "cpu" else ():
        builds = expected_node(config, "cuda", variables_of_rank(rank, ranks)) is not None
        servers.append(
            ForkServer.start(
                [*RANK_MODULES, *(ENGINE_MODULES if builds else ())],
                os.environ | variables_of_rank(rank, ranks),
                first=f"{__name__}:start_engine_early",
                argument="\0".join([str(rank), str(ranks), *script[1:]]),
                new_session=True,
            )
        )
    return servers


def start_engine_early(argument: str) -> list[ForkServer]:
    """Start the processes of the engine that a rank will build, in the process that will become the rank."""
    rank, ranks, *words = argument.split("\0")
    return start_early(parse(words).config, "cuda", {**os.environ, **variables_of_rank(int(rank), int(ranks))})


def variables_of_rank(rank: int, ranks: int) -> dict[str, str]:
    """Return what torchrun will set for a rank, if all ranks are on this host."""
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **size}


def ranks_and_script(words: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Read torchrun's arguments without importing torch: the number of ranks, and the script with its arguments.

    The number is 0 if it is a word ("gpu"), or if there are other hosts.
    """
    at = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    options: dict[str, str] = {}
    for word, following in zip(words[:at], [*words[1:at], ""], strict=False):
        name, is_given, value = word.partition("=")
        options[name.replace("_", "-")] = value if is_given else following
    ranks = options.get("--nproc-per-node", "1")
    one_host = options.get("--nnodes", "1") == "1"
    return int(ranks) if ranks.isdecimal() and one_host else 0, words[at:]
