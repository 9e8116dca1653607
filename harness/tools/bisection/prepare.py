"""The environments of a running bisect: made in the background of its runs, let go when no run can need them."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from pathlib import Path

from harness.tools.bisection import judge, search, supervised
from harness.tools.bisection.environment import Environment, Provider, canonical, check_version, probe_command
from harness.tools.bisection.patience import Patience
from harness.tools.bisection.show import Show
from harness.tools.bisection.state import FOLDER_MODE, State
from harness.tools.bisection.store import Pause, Unreachable
from harness.tools.bisection.uv import Unavailable

PROBE_SECONDS = 300.0


@dataclass
class Preparation:
    """Environments by candidate."""

    state: State
    folder: Path
    provider: Provider
    show: Show
    lock: int
    """Descriptor of the folder's lock, which whatever runs for it holds too."""
    no_gpu: bool
    patience: Patience
    _installs: dict[int, "Future[Environment]"] = field(default_factory=dict)
    _executor: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(max(1, self.state.question.options.installs), thread_name_prefix="install")

    def begin(self, indices: Iterable[int]) -> None:
        """In the background, for what is run next; not while a run is measured."""
        if not self.state.question.has_background:
            return
        for index in indices:
            if index not in self.state.closed_indices and index not in self.state.verdicts:
                self._submit(index)

    def obtain(self, index: int) -> Environment:
        """Raises Unavailable, Pause."""
        while True:
            self._submit(index)
            try:
                environment = self._installs[index].result(timeout=0.5)
                self.patience.restart()
                return environment
            except NotYet:
                self.show.beat()
            except Unreachable as problem:
                del self._installs[index]
                self.patience.wait(problem)

    def release(self, index: int, environment: Environment) -> None:
        """Its run is over."""
        self._installs.pop(index, None)
        self.provider.release(environment)

    def drop(self) -> None:
        """Let go of environments that no run can need any more."""
        wanted = {0, len(self.state.candidates) - 1}
        for edge in search.edges(self.state.verdicts):
            wanted |= set(search.unknown(edge, self.state.verdicts, self.state.closed_indices))
        for index, future in list(self._installs.items()):
            if index not in wanted and len(self.state.records) > 1:
                future.cancel()
                if future.done() and not future.cancelled() and not future.exception():
                    self.provider.release(future.result())
                    del self._installs[index]
                elif future.cancelled():
                    del self._installs[index]

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def probe(self, index: int, environment: Environment) -> str:
        """What is wrong where the package cannot even be imported; "" where it can. Raises Pause."""
        candidate, options = self.state.candidates[index], self.state.question.options
        command = probe_command(environment, options.probe, options.package)
        if not command:
            return ""
        log = self.folder / "probes" / f"{candidate.name}.log"
        log.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        try:
            ended = supervised.run(
                command,
                log,
                environment=environment.variables(self.no_gpu),
                folder="/",
                limit=PROBE_SECONDS,
                inherit=(self.lock,),
                beat=self.show.beat,
            )
        except OSError as error:
            raise Pause(f"the probe of {candidate.shown} could not be run: {error}.") from error
        if not ended.code and not ended.timed_out:
            return ""
        said = judge.first_failure(log, log.parent / "none", ended.code).text or judge.how_it_ended(ended.code)
        return f"cannot run here, the probe fails: {said} (--probe none goes without)"

    def _submit(self, index: int) -> None:
        if index not in self._installs:
            self._installs[index] = self._executor.submit(self._prepare, index)

    def _prepare(self, index: int) -> Environment:
        """On a thread. Raises Unavailable, Pause."""
        candidate, options = self.state.candidates[index], self.state.question.options
        try:
            environment = self.provider.make(candidate)
            if not options.git and (not options.environments or canonical(options.package) in environment.freeze):
                check_version(environment, options.package, candidate.name)
        except Unavailable as problem:
            raise Unavailable(f"cannot be installed: {problem}") from problem
        self.state.installs[candidate.name] = environment.installed_seconds
        return environment
