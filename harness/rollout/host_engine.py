"""HostEngine: the sglang.Engine that one rank of a host builds, the processes that it starts, and how they end.

SGLang's own way to fail is to SIGKILL the process that built the engine. Here a thread watches the processes, says
which one died and why, and ends the rest. Nothing that the engine started outlives it: processes, sockets, names in
/dev/shm.
"""

import atexit
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.cluster.ports import PortLease
from harness.rollout import engine_processes, sglang_api
from harness.rollout.engine_errors import EngineFailed
from harness.rollout.engine_processes import (
    EngineLog,
    output_to,
    restore_handlers,
    sigterm_blocked,
    started_processes,
)
from harness.rollout.forked_processes import Starts, forking
from harness.runtime import scratch
from harness.runtime.child_environment import child_environment
from harness.runtime.errors import say
from harness.runtime.exits import hard_exit
from harness.runtime.fork_server import ForkServer
from harness.runtime.processes import descendants, descendants_since, end_processes


class HostEngine:
    """One sglang.Engine and its processes on this host. Build it in the main thread."""

    def __init__(self, log: Path, base_port: int, on_death: Callable[[str], None] | None = None) -> None:
        """Lease ports and make a folder for temporary files; `start` builds the engine.

        log: file for the output of the engine's processes. on_death: called with a message when one of them dies, on a
        thread, or when SGLang fails in this process; by default print the message and exit with code 1.
        """
        self.engine: Any = None
        """The sglang.Engine; None before `start` and after `stop`."""
        self.log = EngineLog(log)
        self.starts = Starts()
        self._lease = PortLease(base_port)
        self.ports = self._lease.ports
        self._on_death = on_death
        self._handlers = engine_processes.own_handlers()
        # SGLang makes sockets in its folder for temporary files and removes none of them.
        self._scratch = scratch.engine_folder()
        self.folder = Path(self._scratch.name)
        """For temporary files of the engine's processes, and for the sockets by which ranks of this host reach them."""
        self._stop_watching: Callable[[], None] = lambda: None
        self._before: Collection[int] = ()
        """Pids of this process's descendants that are none of the engine's."""

    def start(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str | None],
        serves: bool,
    ) -> None:
        """Build the engine and watch its processes. Raise EngineFailed, with the log's error, if it does not start.

        Processes that were started early (rollout/early_start.py) become the engine's where they can; for others SGLang
        starts a new Python. environment: added to what this process's children inherit; None removes a variable.
        serves: whether this is node 0 of the engine, the only one that can be called.
        """
        arguments = {**arguments, "custom_sigquit_handler": engine_processes.ignore_signal}
        environment = {**environment, **scratch.variables(self.folder)}
        servers = ForkServer.handed_over()
        self._before = descendants().keys() - {server.pid for server in servers}
        with started_processes() as started:
            try:
                with (
                    child_environment(environment),
                    patch.object(tempfile, "tempdir", str(self.folder)),
                    output_to(self.log.path),
                    sigterm_blocked(),
                    forking(servers) as self.starts,
                ):
                    self.engine = sglang_api.build_engine(arguments)
                    # SGLang's own exit handler would end more than the engine's processes: see sglang_api.close.
                    atexit.unregister(self.engine.shutdown)
                    if serves:
                        sglang_api.start_loop(self.engine, engine_processes.TAKEN, self._report_task)
                        sglang_api.unlink_shared_memory(self.engine)
            except Exception as error:
                failure = self.log.start_failure(error, started)
                end_processes(descendants_since(self._before))
                self._scratch.cleanup()
                self._lease.close()
                raise EngineFailed(failure) from error
            finally:
                for server in servers:
                    server.close()
                restore_handlers(self._handlers, engine_serves=self.engine is not None)
        atexit.register(self.stop)
        self._stop_watching = engine_processes.watch_processes(descendants_since(self._before), self._report_death).set

    def stop(self) -> None:
        """End the engine and its processes, and give back what it used. A second call does nothing."""
        self._stop_watching()
        atexit.unregister(self.stop)
        if (engine := self.engine) is not None:
            end_processes(descendants_since(self._before), lambda: sglang_api.close(engine))
            self.engine = None
            restore_handlers(self._handlers, engine_serves=False)
        self._scratch.cleanup()
        self._lease.close()

    def _report_death(self, name: str, pid: int, signal_name: str) -> None:
        self.fail(self.log.death(name, pid, signal_name))

    def _report_task(self, task: str, error: Exception) -> None:
        self.fail(self.log.task_failure(task, error))

    def fail(self, message: str) -> None:
        """Report a failure, on a thread, and end the engine's processes. By default end this process too.

        Report it first: ending the processes may take seconds, in which this rank may be ended too.
        """
        if self._on_death:
            self._on_death(message)
        else:
            say(message + "\n")
        # They are useless now, and they hold a GPU.
        end_processes(descendants_since(()))
        self._scratch.cleanup()
        if not self._on_death:
            scratch.remove_what_exit_would()
            hard_exit(1)  # a thread cannot raise in the main thread, which may sit in a collective for minutes
