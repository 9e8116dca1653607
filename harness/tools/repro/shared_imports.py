"""Fork the variants of many cases from one process that has done their imports (harness/runtime/fork_server.py).

Only without a GPU: there an import initializes CUDA, which a forked process cannot use.
"""

import runpy
import sys
from collections.abc import Sequence

from harness.rollout.early_start import CPU_MODULES
from harness.runtime.cpu_standins import no_gpu
from harness.tools.repro import cases
from harness.tools.repro.case import Case, Variant

PROGRAM_MODULES = ("torch.distributed", "harness.task.tiny_models", "harness.tools.repro.case")
"""What programs without an engine import."""


def may_fork(case: Case, gpus: Sequence[str]) -> bool:
    """Return whether the case's variants may be forked. gpus: those that this process can use."""
    return case.needs == "cpu" and not case.new_python and not gpus and no_gpu() != ""


def modules_of(chosen: Sequence[Case]) -> Sequence[str]:
    """Return what to import for these cases; nothing if a new Python for each variant is as fast."""
    engine = any(case.engine for case in chosen)
    if not engine and len(chosen) < 2:
        return ()
    families = sorted({case.program.__module__ for case in chosen})
    return [*PROGRAM_MODULES, *families, *(CPU_MODULES if engine else ())]


def task_of(case: Case, variant: Variant) -> tuple[str, bytes]:
    """Return the function that runs a variant in a forked process, and its argument."""
    return f"{__name__}:run_program", "\0".join((case.slug, variant)).encode()


def run_program(words: bytes) -> None:
    """Run a variant as `python -m` does, in the process that was forked for it."""
    sys.argv = ["", *words.decode().split("\0")]
    runpy.run_module(cases.__name__, run_name="__main__", alter_sys=True)
