"""The proof that weights arrived, in a training script that does not otherwise use this project.

    from harness.tools.verify.in_training import ServerCheck

    check = ServerCheck("http://10.0.0.5:30000", model="/models/qwen3")  # a folder with config.json
    ...
    send_weights(model)  # your own update
    check(names_and_tensors(model)).raise_if_wrong()

`names_and_tensors` yields what the server must hold, by checkpoint names: full tensors, or DTensors, as FSDP2 has them.
With DTensors every rank calls the check with its own, because gathering one is collective; with full tensors rank 0
alone may. What it yields is written to a scratch folder of rank 0, and launch/verify.py compares the server with that.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.tools.environments import REPOSITORY
from harness.tools.verify.sender import write_tensors

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank that a program which is none must not have."""


class WeightsDiffer(RuntimeError):
    """The server does not hold what was sent."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What launch/verify.py said."""

    code: int
    """0 equal, 1 different, 2 it could not be asked as it was, 125 it cannot be told."""
    said: str
    """Its last line."""

    def raise_if_wrong(self) -> None:
        """Raise WeightsDiffer unless the server holds what it must."""
        if self.code:
            raise WeightsDiffer(self.said)


@dataclass(frozen=True)
class ServerCheck:
    """Compares a server with the trainer's weights whenever it is called."""

    server: str
    model: str
    """A folder with the model's config.json."""
    api_key_file: str = ""
    scratch: str | None = None
    """Where rank 0 writes the weights meanwhile; None: the system's folder for temporary files."""
    collective: bool = True
    """False: one rank alone makes each check, with full tensors."""

    def __call__(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Verdict:
        """Compare; return the same verdict on every rank.

        A collective call of all ranks if torch.distributed is initialized and `collective` is not False.
        """
        together = self.collective and dist.is_initialized()
        rank = dist.get_rank() if together else 0
        with tempfile.TemporaryDirectory(prefix="verify-", dir=self.scratch) as folder:
            write_tensors(named_tensors, Path(folder), keep=rank == 0)
            found = [self._ask(folder)] if rank == 0 else [None]
        if together:
            dist.broadcast_object_list(found)
        assert found[0] is not None
        return found[0]

    def _ask(self, folder: str) -> Verdict:
        command = [sys.executable, str(REPOSITORY / "launch" / "verify.py"), "--server", self.server]
        command += ["--weights", folder, "--model", self.model]
        command += ["--api-key-file", self.api_key_file] if self.api_key_file else []
        environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = (done.stdout if done.returncode in (0, 1) else done.stderr).strip().splitlines()
        return Verdict(code=done.returncode, said=lines[-1] if lines else f"{command[1]} said nothing")
