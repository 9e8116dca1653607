"""Put the CPU stand-ins on the path of this process and of its children; never used on CUDA.

Nothing installed is edited. The folder `standins/` goes first on sys.path and PYTHONPATH, so spawned and torchrun
children see it too. It holds:

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
from collections.abc import Sequence
from pathlib import Path


def standins_path() -> Path:
    """The folder that goes first on sys.path in CPU mode."""
    return Path(__file__).resolve().parent / "standins"


def activate() -> tuple[str, ...]:
    """Put the stand-ins first on sys.path and PYTHONPATH; a second call changes nothing.

    Call it before sglang, transformers or torchvision is imported. Returns one sentence a stand-in, for the console.
    Raises RuntimeError if sgl_kernel or torchvision was imported from elsewhere first, for then a stand-in could not
    take its place.
    """
    folder = str(standins_path())
    if folder not in sys.path:
        for name in ("sgl_kernel", "torchvision"):
            if name in sys.modules:
                raise RuntimeError(
                    f"{name} is already imported; activate() must come before it, and before sglang and transformers"
                )
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
    shadowed = _installed("sgl_kernel")
    return (
        "sgl_kernel: import-only stand-in, whose functions raise NotImplementedError"
        + (f"; it hides the one installed in {shadowed}" if shadowed else ""),
        "torchvision: the installed package, with nms and qnms declared where its CUDA extension cannot load",
        "harness_sglang_cpu: SGLang plugin that gives MLA models (DeepSeek) the absorbed method on torch_native",
    )


def torch_is_for_cpu() -> bool:
    """Whether the installed torch is built without CUDA and ROCm, read from its source; False where there is none."""
    folder = _installed("torch")
    version = folder / "version.py" if folder else None
    if version is None or not version.is_file():
        return False
    builds = re.findall(r"^(?:cuda|hip)\b.*= *(\S+)", version.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(builds) and set(builds) == {"None"}


def engine_environment(ranks_on_host: int) -> dict[str, str]:
    """What SGLang's CPU mode reads from the environment, for `ranks_on_host` engine ranks on this host.

    The cores this process may use are split evenly and in order, one entry a rank ("0-3|4-7"); with more ranks than
    cores the ranks go round the cores, one core each. Engines of several stages or hosts: see cores_by_tp_rank.
    """
    if ranks_on_host < 1:
        raise ValueError(f"ranks_on_host = {ranks_on_host} must be 1 or more")
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks_on_host
    entries = [
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) if share else str(cores[rank % len(cores)])
        for rank in range(ranks_on_host)
    ]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(entries),
        # With two threads MKL's first vector call, the rotary table's cos, races over which kernels suit the CPU: one
        # half may come out with 13 bits, for the life of the engine. Seen with torch 2.13: log-probs off by 5e-5.
        "OMP_NUM_THREADS": "1",
        # With tp > 1 SGLang compiles the masking of token ids by torch.compile, on the CPU with a C++ compiler: 5 to 30 s at
        # the first token of a fresh machine, for a few integer operations.
        "TORCHDYNAMO_DISABLE": "1",
        # Beside a torch that brings NCCL (its CUDA build) SGLang would open NCCL communicators on the CPU, and die. A
        # library that is not there turns that off, as it does beside a CPU build.
        "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
    }


def cores_by_tp_rank(entries: Sequence[str], tp_ranks: Sequence[int], tp: int) -> list[str]:
    """Entries of SGLANG_CPU_OMP_THREADS_BIND for a SGLang that wants one for each TP rank of the engine: the cores of all
    stages of it on this host; where it has none here, what nobody reads. entries, tp_ranks: of each engine rank here."""
    cores: list[list[str]] = [[] for _ in range(tp)]
    for entry, index in zip(entries, tp_ranks, strict=True):
        cores[index].append(entry)
    return [",".join(dict.fromkeys(each)) or entries[0] for each in cores]


def require_absorbed_mla() -> None:
    """Raise NotImplementedError unless the installed SGLang can serve an MLA model (DeepSeek) on CPU.

    SGLang logs a plugin that fails and goes on, and releases without plugins never ask for ours, so the plugin cannot
    refuse. Call this before an engine with an MLA model starts; it looks for the files, and imports nothing of SGLang.
    """
    folder = _installed("sglang")
    needed = ("srt/plugins/__init__.py", "srt/models/deepseek_common/attention_backend_handler.py")
    if folder is None or not all((folder / path).is_file() for path in needed):
        raise NotImplementedError(
            f"an MLA model (DeepSeek) cannot run on CPU with the sglang in {folder}: it has no plugins or no "
            "attention registry for the absorbed method, which sglang 0.5.20 has"
        )


def _installed(package: str) -> Path | None:
    """The folder of an installed package, the stand-ins left aside; None if there is none."""
    folder = str(standins_path())
    spec = importlib.machinery.PathFinder.find_spec(package, [entry for entry in sys.path if entry != folder])
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None
