"""Stand-ins for packages that SGLang needs on a CPU and that no registry has for the CPU.

activate() puts the folder `standins/` first on sys.path, and on PYTHONPATH for the processes that this one starts. It
is never called on CUDA, and no installed file changes. The folder holds:

- sgl_kernel: no CPU build is published. The stand-in can be imported. It has, in plain torch, what a chain of drafts calls
  (speculative decoding); its other functions raise NotImplementedError.
- torchvision: the published build is for CUDA. With a CPU build of torch its import fails, because two operators are
  missing. The stand-in declares them and then loads the installed package.
- harness_sglang_cpu: a plugin of SGLang (an entry point). Without it DeepSeek's MLA cannot prefill with
  attention_backend = "torch_native", and routed experts need pinned memory.
- harness_sglang_fp8: another plugin of the same package, for engines with block-FP8 weights.
- harness_sglang_draft: another one, for engines with a draft model (EAGLE, NEXTN).
"""

import importlib.machinery
import os
import re
import sys
from pathlib import Path

STANDINS = Path(__file__).resolve().parent / "standins"
"""The folder that goes first on sys.path in CPU mode."""


def activate() -> tuple[str, ...]:
    """Put the stand-ins first on sys.path and PYTHONPATH, and return their names. A second call changes nothing.

    Raise RuntimeError if sgl_kernel or torchvision was imported before, because a stand-in could not replace it then.
    """
    folder = str(STANDINS)
    if folder not in sys.path:
        for name in ("sgl_kernel", "torchvision"):
            if name in sys.modules:
                raise RuntimeError(
                    f"{name} is already imported; call activate() before importing it, sglang or transformers"
                )
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
    return "sgl_kernel", "torchvision", "harness_sglang_cpu"


def make_transformers_importable() -> None:
    """Call activate() if torch is a CPU build and torchvision is not imported yet.

    Call it before importing models of transformers, because these import torchvision.
    """
    if "torchvision" not in sys.modules and torch_is_for_cpu():
        activate()


def torch_is_for_cpu() -> bool:
    """Return whether the installed torch is built without CUDA and ROCm, without importing it. False without torch."""
    folder = installed_folder("torch")
    version = folder / "version.py" if folder else None
    if version is None or not version.is_file():
        return False
    builds = re.findall(r"^(?:cuda|hip)\b.*= *(\S+)", version.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(builds) and set(builds) == {"None"}


def installed_folder(package: str) -> Path | None:
    """Return the folder of an installed package that is not a stand-in, or None."""
    spec = importlib.machinery.PathFinder.find_spec(package, [entry for entry in sys.path if entry != str(STANDINS)])
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None
