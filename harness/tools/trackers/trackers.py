"""Experiment trackers of a run: each row of metrics.jsonl also goes to TensorBoard and wandb, where [trackers] names them.

Rank 0 alone writes. A tracker that cannot start ends the run before its engines start; one that fails later is left out
from then on, with a warning there and then and again at the end: metrics.jsonl has every row.
"""

import importlib.util
import netrc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from harness.config.layers import ConfigError, to_toml
from harness.config.schema import Config
from harness.runtime import redact
from harness.runtime.observer import Observer, RunContext

CLOSE_SECONDS = 60.0
"""How long a tracker may take to send what it has left."""
Mode = Literal["online", "offline", "shared", "disabled"]
MODES: dict[str, Mode] = {
    "online": "online", "offline": "offline", "shared": "shared", "disabled": "disabled", "dryrun": "offline", "run": "online",
}  # fmt: skip
"""Values of WANDB_MODE; the last two are old names."""


class Tracker(Protocol):
    """Where the numbers of a run go."""

    place: str
    """For the console: where to look."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write the values of one step, at once."""

    def close(self, code: int) -> None:
        """Send all that is left. code: the run's exit code, 0 or 1."""


class TensorBoard:
    """Event files below the run directory, for `tensorboard --logdir`."""

    def __init__(self, run: RunContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.place = f"tensorboard --logdir {folder}"
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("config", f"```\n{redact.text(to_toml(run.config))}```")

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, code: int) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases; its files are below the run directory."""

    def __init__(self, run: RunContext) -> None:
        import wandb

        mode, trackers = wandb_mode(os.environ), run.config.trackers
        self.run = wandb.init(
            project=trackers.project or None,  # then WANDB_PROJECT counts
            name=trackers.experiment or run.folder.name,
            config=hide(asdict(run.config)),
            dir=str(run.folder),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),  # the console is the harness's
        )
        self._teardown = wandb.teardown
        own = Path(str(self.run.dir)).parent  # of which files/ is a part
        self.place = f"offline; wandb sync {own}" if mode == "offline" else str(self.run.url or mode)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, code: int) -> None:
        """Wait for the process that writes, too: finish alone may return before a file has its end."""
        self.run.finish(exit_code=code)
        self._teardown(code)


TRACKERS: dict[str, Callable[[RunContext], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}
"""Name, which is that of the package too -> tracker."""


def check_trackers(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError, one sentence, where a tracker cannot start on this host: its package or a login is missing."""
    names = config.trackers.names
    if missing := [name for name in names if not _is_installed(name)]:
        raise ConfigError(
            f'trackers.names has "{missing[0]}", but {sys.executable} has no package {missing[0]}; install it with'
            f" `{installer()} {' '.join(missing)}`, or leave it out of trackers.names."
        )
    if "wandb" in names:
        wandb_mode(environment)


def installer() -> str:
    """Return the command that installs a package for this Python, as this environment was made: by uv, else by pip."""
    uv = Path(sys.executable).parent / "uv"
    own = f"{uv} pip install --python {sys.executable}"
    return own if uv.is_file() or not shutil.which("pip") else f"{sys.executable} -m pip install"


def wandb_mode(environment: Mapping[str, str]) -> Mode:
    """Return WANDB_MODE; where it is not set, online with a login and offline without one: wandb never asks for it.

    Raise ConfigError where WANDB_MODE has no meaning, or asks for what needs a login that is not there.
    """
    asked = environment.get("WANDB_MODE", "")
    if asked and asked not in MODES:
        raise ConfigError(f'WANDB_MODE must be one of {", ".join(MODES)}, got "{asked}".')
    mode = MODES[asked] if asked else "online" if has_login(environment) else "offline"
    if mode in ("online", "shared") and not has_login(environment):
        raise ConfigError(
            f'WANDB_MODE = "{asked}" needs a login, and there is none: set WANDB_API_KEY or run `wandb login` before, or set'
            " WANDB_MODE=offline."
        )
    return mode


def has_login(environment: Mapping[str, str]) -> bool:
    """Return whether wandb finds a key without asking: in a variable, or for its server in the user's netrc file."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    own = environment.get("NETRC")
    files = [Path(own).expanduser()] if own else [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]
    for file in files:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(file)).authenticators(host):
                return True
    return False


def hide(values: Any, name: str = "") -> Any:
    """Return a nested table without the values of secrets, for a server."""
    if isinstance(values, dict):
        return {key: hide(value, key) for key, value in values.items()}
    return redact.variable(name, values) if isinstance(values, str) else values


class TrackerWriter(Observer):
    """Give each row to the trackers, on rank 0."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.trackers: dict[str, Tracker] = {}
        self.failures: list[str] = []

    def met(self, run: RunContext) -> None:
        """Start the trackers. A collective call of all ranks; raise ConfigError on each where one does not start."""
        from harness.cluster.world import all_gather

        error = ""
        if run.world.rank == 0:
            self.say = run.events.say
            for name in self.names:
                try:
                    self.trackers[name] = TRACKERS[name](run)
                    self.say(f"tracker {name}: {self.trackers[name].place}")
                except Exception as raised:  # of the package's own kinds, by release
                    instead = "WANDB_MODE=offline needs no network, and " if name == "wandb" else ""
                    error = f"tracker {name} cannot start: {_line(raised)}; {instead}trackers.names may leave it out."
                    break
        if error := all_gather(error)[0]:
            raise ConfigError(error)

    def measured(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row; the check after the last update counts as a step of its own."""
        step = int(row.get("step", row.get("validation/step", row.get("final/step", 0))))
        values = {name: value for name, value in row.items() if isinstance(value, int | float)}
        for name in list(self.trackers):
            self._try(name, lambda tracker: tracker.write(values, step), f"step {step}")

    def phase_begins(self, phase: str, step: int | None) -> None:
        """Close before the engine's processes end, with which a tracker's would."""
        if phase == "shutdown":
            for name in list(self.trackers):
                self._try(name, _close, "its end")
            self.trackers.clear()

    def failed(self, error: str, traceback: str) -> None:
        """Close beside what ends this rank, which does not wait: what a tracker has not sent by then, metrics.jsonl has."""
        for tracker in self.trackers.values():
            threading.Thread(target=tracker.close, args=[1], name="close-tracker", daemon=True).start()

    def passed(self) -> None:
        """Repeat what has failed, near the verdict."""
        for sentence in self.failures:
            self.say(sentence)

    def _try(self, name: str, call: Callable[[Tracker], None], where: str) -> None:
        try:
            call(self.trackers[name])
        except Exception as error:
            self.failures.append(
                f"warning: tracker {name} failed at {where} and has no more of this run ({_line(error)}); metrics.jsonl has"
                " every row"
            )
            self.say(self.failures[-1])
            del self.trackers[name]


def _close(tracker: Tracker) -> None:
    """Close, within CLOSE_SECONDS. Raise TimeoutError where that is not enough, or what closing raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            tracker.close(0)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="close-tracker", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"not all was sent in {CLOSE_SECONDS:.0f} s")
    for error in raised:
        raise error


def _is_installed(package: str) -> bool:
    """Return whether it can be imported; a folder of that name, such as wandb's own, is no package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
