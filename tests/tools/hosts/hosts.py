"""Starts emulated hosts and reads what they say."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.tools.hosts import kernel

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parents[2] / "launch" / "hosts.py"
PLAIN = HERE / "plain_hosts.py"
ON_HOST = str(HERE / "on_host.py")
SECONDS = 90

REFUSAL = kernel.refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=f"hosts in namespaces cannot be had here: {REFUSAL}")


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    output: str

    @property
    def console(self) -> list[str]:
        """The launcher's own lines."""
        return [line for line in self.output.splitlines() if line.startswith("hosts: ")]

    def json_of(self, host: str) -> list[dict[str, Any]]:
        """A host's lines of JSON."""
        lines = [line.removeprefix(f"{host} | ") for line in self.output.splitlines() if line.startswith(f"{host} | ")]
        return [json.loads(line) for line in lines if line.startswith("{")]


def command(*words: str, launcher: Path = PLAIN) -> list[str]:
    return [sys.executable, str(launcher), *words]


def run(*words: str, launcher: Path = PLAIN) -> Answer:
    """Options, then --, then the script."""
    done = subprocess.run(
        command(*words, launcher=launcher),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return Answer(done.returncode, done.stdout)
