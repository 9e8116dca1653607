"""The proof that weights arrived, in a training script that does not otherwise use this project.

    from harness.tools.verify.in_training import ServerCheck

    check = ServerCheck("http://10.0.0.5:30000", model="/models/qwen3")  # a folder with config.json
    ...
    send_weights(model)  # your own update
    check(names_and_tensors(model)).raise_if_wrong()

`names_and_tensors` yields what the server must hold, by checkpoint names: full tensors or DTensors, as FSDP2 has them, on
any device. What it yields is written to a scratch folder of rank 0, and launch/verify.py compares the server with that.
Yield DTensors as they are: the check gathers each only when all ranks have it, so that no rank waits for one that failed.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.rollout.engine_settings import engine_environment
from harness.tools.environments import REPOSITORY
from harness.tools.verify.sender import write_tensors

NamedTensors = Iterable[tuple[str, torch.Tensor]]
SCRIPT = REPOSITORY / "launch" / "verify.py"
HINT = "give --was FOLDER, the version before,", "give remember=True"
"""What launch/verify.py advises, and what that is in a script."""


class NotVerified(RuntimeError):
    """Nothing is known about the server: it could not be asked, or a rank failed to give its tensors."""


class WeightsDiffer(RuntimeError):
    """The server does not hold what was sent."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What launch/verify.py said."""

    code: int
    """0 equal, 1 different, 2 it could not be asked as it was, 125 it cannot be told."""
    lines: tuple[str, ...]
    """All that it said; the last line is the verdict, or why there is none."""

    @property
    def said(self) -> str:
        """The last line, without what it begins with."""
        last = self.lines[-1] if self.lines else f"{SCRIPT.name} said nothing and ended with exit code {self.code}"
        return last.removeprefix("VERDICT: ").removeprefix("error: ")

    def raise_if_wrong(self) -> None:
        """Raise WeightsDiffer if the server holds something else, NotVerified if that could not be found out."""
        if self.code:
            raise (WeightsDiffer if self.code == 1 else NotVerified)(self.said)


@dataclass
class ServerCheck:
    """Compares a server with the trainer's weights whenever it is called."""

    server: str
    model: str
    """A folder with the model's config.json; nothing else in it is read."""
    remember: bool = False
    """Keep what one call was given until the next one, so that a tensor that was not updated is told to be old."""
    collective: bool = True
    """False: one rank alone makes each check, with full tensors."""
    scratch: str | None = None
    """Where rank 0 writes the weights meanwhile; None: the system's folder for temporary files."""
    options: Sequence[str] = ()
    """More options of launch/verify.py, such as ("--api-key-file", FILE) or ("--layers", "0-3")."""
    seconds: float = 3600.0
    """How long ranks wait for each other, and for the verdict."""
    _before: "tempfile.TemporaryDirectory[str] | None" = field(default=None, init=False, repr=False)

    def __call__(self, named_tensors: NamedTensors) -> Verdict:
        """Compare; return the same verdict on every rank.

        If torch.distributed is initialized, all ranks must call it with the same names in the same order, because
        gathering a DTensor is collective; with `collective` False one rank alone calls it. Raise NotVerified, on every
        rank, if one of them fails.
        """
        with _group(self.collective, self.seconds) as group:
            given, verdict = _in_step(named_tensors, group), None
            try:
                if group and dist.get_rank():
                    write_tensors(given, Path(), keep=False)
                else:
                    verdict = self._compare(given)
            except NotVerified:
                raise  # all have it
            except Exception as error:
                _meet(NotVerified(f"{type(error).__name__}: {error}"), group)
            found: Verdict = _meet(verdict, group)[0]
            return found

    def _compare(self, named_tensors: NamedTensors) -> Verdict:
        folder: tempfile.TemporaryDirectory[str] | None
        folder = tempfile.TemporaryDirectory(prefix="verify-", dir=self.scratch)
        try:
            write_tensors(named_tensors, Path(folder.name), keep=True)
            verdict = self._ask(folder.name)
            if self.remember:
                self._before, folder = folder, self._before
            return verdict
        finally:
            if folder:
                folder.cleanup()

    def _ask(self, folder: str) -> Verdict:
        """Run launch/verify.py, whose progress goes to standard error as it comes."""
        command = [sys.executable, str(SCRIPT), "--server", self.server, "--weights", folder, "--model", self.model]
        command += ["--was", self._before.name] if self._before else []
        command += self.options
        told: list[str] = []
        with tempfile.TemporaryFile("w+") as answer:
            own = engine_environment(os.environ, {})  # it is no rank
            with subprocess.Popen(command, env=own, stdout=answer, stderr=subprocess.PIPE, text=True) as child:
                for line in child.stderr or ():
                    print(line, end="", file=sys.stderr, flush=True)
                    told.append(line.rstrip())
            answer.seek(0)
            lines = answer.read().splitlines() if child.returncode in (0, 1) else told[-1:]
        named = [each.replace(folder, "the trainer").replace(*HINT) for each in lines]
        if self._before:
            named = [each.replace("--was", "the call before") for each in named]
        return Verdict(code=child.returncode, lines=tuple(named))


def _meet(said: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return what each rank of a check says, a collective call. Raise NotVerified if one of them says that it failed."""
    everyone = all_gather(said, group) if group else [said]
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(everyone) if isinstance(each, NotVerified)]
    if failed:
        raise NotVerified("; ".join(failed))
    return everyone


def _in_step(named_tensors: NamedTensors, group: dist.ProcessGroup | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, each after all ranks have said that they have it too."""
    tensors = iter(named_tensors)
    while True:
        item = next(tensors, None)
        names = _meet(item and item[0], group)
        if any(name != names[0] for name in names):
            raise NotVerified(f"the ranks must give the same names in the same order; they gave {names}.")
        if item is None:
            return
        if group is None and isinstance(item[1], DTensor) and item[1].device_mesh.size() > 1:
            raise NotVerified(f"{item[0]} is a DTensor: call the check on all of its ranks, with collective=True.")
        yield item


@contextmanager
def _group(collective: bool, seconds: float) -> Iterator[dist.ProcessGroup | None]:
    """Yield a group for the words of the ranks, as NCCL gives up what takes ten minutes; None for one rank alone."""
    if not (collective and dist.is_initialized()):
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
