"""Run torchrun so that the ranks of a host without a GPU are forked from one process that has done their imports.

That process is a fork of the launcher. With a GPU torchrun starts the ranks: SGLang's imports initialize CUDA, which no
fork could use.
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
from harness.rollout.early_start import CPU_MODULES, IMPORTING
from harness.runtime.cpu_standins import activate, no_gpu
from harness.runtime.events import working
from harness.runtime.fork_server import ForkedChild, ForkServer, ServerGone, Task, import_once
from harness.tools import folded_torchrun, kernel_caches

NUMBERS = {
    "--nproc-per-node": (r"0*[1-9]\d*|auto|cpu|gpu|xpu", "a number of ranks, auto, cpu, gpu or xpu"),
    "--nnodes": (r"0*[1-9]\d*(:0*[1-9]\d*)?", "a number of hosts, or the least and the most as 1:4"),
}
"""Options of torchrun, what they take, and the same in words."""
WITHOUT_ENGINE = ("doctor.py", "repro.py")
"""Scripts whose ranks import no SGLang on the way to their work."""
LOOK_SECONDS = 0.05
RANK_MODULES = ("harness.run", "harness.tools.observers", "harness.train", *CPU_MODULES)
"""What a rank and the processes of its engine import."""


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
        task = Task(f"{__name__}:run_script", script, environment, new_session=True)
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
    """Run a script with its arguments as `python -u` does, in the process that was forked for it.

    Give it a server for the engine that it may build.
    """
    ForkServer.hand_over([ForkServer.here()])
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
    """Do the imports of the ranks, and run torchrun on this process's arguments. Return the exit code.

    torchrun's own output goes to a file in the run directory (see folded_torchrun).
    """
    server = server_of_ranks(sys.argv[1:])
    with folded_torchrun.Launch.open("starting the ranks") as launch:
        with launch.imports():
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
            from torch.distributed.run import main as torchrun

        launch.starting.importing = False
        handler = subprocess_handler.SubprocessHandler
        start_python = handler._popen

        def start_rank(self: Any, words: Sequence[str], environment: dict[str, str]) -> Any:
            try:
                if server and (script := script_of(words)):
                    return ForkedRank(server, script, environment, self._stdout, self._stderr)
            except ServerGone as error:
                said = f"local rank {self.local_rank_id} starts as torchrun starts it: {error}"
                print(said, file=sys.stderr, flush=True)
            finally:
                launch.started()
            return start_python(self, tuple(words), environment)

        with patch.object(handler, "_popen", start_rank):
            return launch.run(torchrun, sys.argv[1:])


def server_of_ranks(words: Sequence[str]) -> ForkServer | None:
    """Return the server that forks the ranks of a host without a GPU; None if torchrun is to start them.

    words: torchrun's arguments. If an import fails, a rank will fail by it and show it.
    """
    os.environ.update(kernel_caches.variables(os.environ))
    script = next((Path(word).name for word in words if word.endswith(".py")), "")
    if script in WITHOUT_ENGINE or not no_gpu():
        return None
    activate()
    try:
        with working(IMPORTING, importing=True):
            print(f"{IMPORTING}, once for all ranks of this host", flush=True)
            import_once(RANK_MODULES, os.environ)
    except Exception:  # whatever a broken package raises
        return None
    return ForkServer.here()
