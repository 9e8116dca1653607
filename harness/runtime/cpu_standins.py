"""Put the stand-ins for what CPU lacks on package registries on the path of this process and its children.

Never used on CUDA, and nothing installed is edited. The folder `standins/` goes first on sys.path and PYTHONPATH, so
spawned and torchrun children see it too. It holds:

- sgl_kernel: no CPU build is published. Importable, and every function raises NotImplementedError when called.
- torchvision: the published build is CUDA's, and fails to import beside a CPU torch for want of two operators. The
  stand-in declares them and hands over to the installed package.
- harness_sglang_cpu: a SGLang plugin (entry point) without which DeepSeek's MLA cannot prefill on
  attention_backend="torch_native".
"""

import importlib.machinery
import os
import re
import sys
from pathlib import Path

STANDINS = Path(__file__).resolve().parent / "standins"
"""The folder that goes first on sys.path in CPU mode."""


def activate() -> tuple[str, ...]:
    """Put the stand-ins first on sys.path and PYTHONPATH, and return their names; a second call changes nothing.

    Raises RuntimeError if sgl_kernel or torchvision was imported from elsewhere first, for then a stand-in could not
    take its place.
    """
    folder = str(STANDINS)
    if folder not in sys.path:
        for name in ("sgl_kernel", "torchvision"):
            if name in sys.modules:
                raise RuntimeError(
                    f"{name} is already imported; activate() must come before it, and before sglang and transformers"
                )
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
    return "sgl_kernel", "torchvision", "harness_sglang_cpu"


def make_transformers_importable() -> None:
    """Call activate() beside a CPU build of torch, unless torchvision is imported already.

    Every package of the harness that imports models of transformers, which import torchvision, calls it first.
    """
    if "torchvision" not in sys.modules and torch_is_for_cpu():
        activate()


def torch_is_for_cpu() -> bool:
    """Return whether the installed torch is built without CUDA and ROCm, read from its source; False without torch."""
    folder = installed_folder("torch")
    version = folder / "version.py" if folder else None
    if version is None or not version.is_file():
        return False
    builds = re.findall(r"^(?:cuda|hip)\b.*= *(\S+)", version.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(builds) and set(builds) == {"None"}


def installed_folder(package: str) -> Path | None:
    """Return the folder of an installed package, the stand-ins left aside; None if there is none."""
    spec = importlib.machinery.PathFinder.find_spec(package, [entry for entry in sys.path if entry != str(STANDINS)])
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None
