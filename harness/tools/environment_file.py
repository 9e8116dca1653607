"""environment.json: the host, device, package versions and variables of every rank of a run."""

import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

import psutil

from harness.observer import Observer, RunContext
from harness.runtime import redact

PACKAGES = (
    "torch", "sglang", "transformers", "torch_memory_saver", "sglang-kernel", "sgl-kernel", "flashinfer-python", "triton",
    "datasets", "accelerate", "safetensors", "numpy",
)  # fmt: skip
NOT_INSTALLED = "not installed"


class EnvironmentFile(Observer):
    """Write the file on rank 0."""

    def met(self, run: RunContext) -> None:
        import torch

        from harness.cluster.world import all_gather, behaviour

        device = run.world.device
        facts = {
            "rank": run.world.rank,
            "host": run.world.host,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "platform": platform.platform(),
            "versions": package_versions(),
            "command": command(),
            "environment": behaviour(os.environ),
        }
        everyone = all_gather(facts)
        if run.world.rank == 0:
            (run.folder / "environment.json").write_text(json.dumps(everyone, indent=1), encoding="utf-8")


def command() -> str:
    """Return the shell command that started this rank, without secrets: torchrun's if torchrun did, else the rank's
    own.
    """
    parent = psutil.Process().parent()
    words = parent.cmdline() if parent else []
    is_torchrun = any(
        word == "torch.distributed.run" or Path(word).name in ("torchrun", "torchrun.py") for word in words[:3]
    )
    return shlex.join(redact.words(words if is_torchrun else sys.orig_argv))


def package_versions() -> dict[str, str]:
    """Return the versions of Python and PACKAGES, from their metadata, because importing SGLang takes 17 s."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found
