"""Run torchrun so that the ranks of this host are forked from one process that has done their imports."""

import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.rollout.cpu_mode import CPU_MODE
from harness.rollout.early_start import ENGINE_MODULES
from harness.runtime import kernel_caches
from harness.runtime.cpu_standins import activate
from harness.runtime.fork_server import ForkedChild, ForkServer, Task
from harness.tools.preflight import no_gpu

RANK_MODULES = ("harness.run", "harness.tools.observers", "harness.train")


class ForkedRank(ForkedChild):
    """A rank that was forked, in the place of the subprocess.Popen that torchrun keeps for it."""

    def __init__(
        self, server: ForkServer, words: Sequence[str], environment: Mapping[str, str], output: Any, error: Any
    ):
        """Fork a rank that runs a script. words: the script and its arguments. output, error: files, or None for ours."""
        self.args = list(words)
        sentinel, held_by_rank = os.pipe()
        streams = [0, output.fileno() if output else 1, error.fileno() if error else 2]
        task = Task(
            f"{__name__}:run_script", "\0".join(words).encode(), environment, new_session=True, gets_server=True
        )
        try:
            pid = server.fork(task, [*streams, held_by_rank])
        finally:
            os.close(held_by_rank)
        super().__init__(pid, sentinel)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the rank has been waited for."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run_script(words: bytes, descriptors: Sequence[int]) -> None:
    """Run a script with its arguments as `python -u` does, in the process that was forked for it."""
    sys.argv = words.decode().split("\0")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True, line_buffering=True)  # type: ignore[union-attr]
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    _show_as(sys.argv)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _show_as(words: Sequence[str]) -> None:
    """Show this process in lists of processes as the script that it runs."""
    try:
        from setproctitle import setproctitle
    except ModuleNotFoundError:  # SGLang needs it, older releases may not
        return
    setproctitle(" ".join([sys.executable, "-u", *words]))
    Path("/proc/self/comm").write_text("python", encoding="ascii")  # which setproctitle cuts out of the title


def script_of(words: Sequence[str]) -> Sequence[str]:
    """Return the script and its arguments if torchrun's command for a rank is `python -u SCRIPT ...`, else nothing."""
    is_script = len(words) > 2 and words[0] == sys.executable and words[1] == "-u" and words[2].endswith(".py")
    return words[2:] if is_script else ()


def run_torchrun() -> None:
    """Start the imports, and run torchrun on this process's arguments meanwhile.

    On a host with a GPU, torchrun starts the ranks: an import initializes CUDA there, which a forked process cannot use.
    """
    if not no_gpu():
        from torch.distributed.run import main as torchrun

        torchrun()
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    os.environ.update({name: value for name, value in CPU_MODE.items() if name != "OMP_NUM_THREADS"})
    os.environ.update(kernel_caches.variables(os.environ))
    activate()
    server = ForkServer.start([*RANK_MODULES, *ENGINE_MODULES], os.environ)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main as torchrun

    handler = subprocess_handler.SubprocessHandler
    start_python = handler._popen

    def start_rank(self: Any, words: Sequence[str], environment: dict[str, str]) -> Any:
        script = script_of(words)
        if not script or server.obstacle(environment):
            return start_python(self, tuple(words), environment)
        return ForkedRank(server, script, environment, self._stdout, self._stderr)

    with patch.object(handler, "_popen", start_rank):
        torchrun()
