"""environment.json: the host, device, package versions and variables of every rank of a run."""

import json
import os
import platform
from importlib import metadata

from harness.observer import Observer, RunContext

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
            "environment": behaviour(os.environ),
        }
        everyone = all_gather(facts)
        if run.world.rank == 0:
            (run.folder / "environment.json").write_text(json.dumps(everyone, indent=1), encoding="utf-8")


def package_versions() -> dict[str, str]:
    """Return the versions of Python and PACKAGES, from their metadata, because importing SGLang takes 17 s."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found
