"""Stand-ins for packages that SGLang needs on a CPU and that no registry has for the CPU.

An environment that tools/environments.py makes for the CPU starts every Python with the folder `standins/` on sys.path
before the installed packages, and in the variables of SGLang's CPU mode. activate() does the same for this process, in
an environment that has been made otherwise. Neither happens on CUDA, and no installed file changes. The folder holds:

- harness_cpu_mode: these variables.
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
from collections.abc import Mapping
from pathlib import Path

from harness.runtime.standins.harness_cpu_mode import set_variables

STANDINS = Path(__file__).resolve().parent / "standins"
"""The folder that comes before the installed packages in CPU mode."""
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""In /dev: NVIDIA's, those of Windows' Linux, AMD's."""


def activate() -> None:
    """Put this checkout's stand-ins on sys.path and PYTHONPATH, unless they are there, and set the variables of
    SGLang's CPU mode.

    Call it before anything imports transformers or SGLang.
    """
    folder = str(STANDINS)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    set_variables()


def no_gpu(environment: Mapping[str, str] = os.environ) -> str:
    """Return why this host has no usable GPU, as part of a sentence; "" if it may have one.

    Only device files and torch's build are looked at. Problems with the driver show once torch is imported.
    """
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES = {environment['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
    if not any(next(Path("/dev").glob(pattern), None) for pattern in GPU_FILES):
        return "this host has no GPU"
    return "the torch that is installed here is built for the CPU" if torch_is_for_cpu() else ""


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
