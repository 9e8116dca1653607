"""An engine that resumes beside a trainer that holds its memory dies in cu_mem_create.

The memory saver's C++ reports it, without a Python traceback.
"""

from harness.runtime.units import GIB, MIB
from harness.tools.repro.case import Case
from harness.tools.repro.gpu_helpers import allocate, free_bytes
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="the trainer holds all but 512 MiB of what is free",
    healthy="the trainer holds 512 MiB",
    signature=(r"func=(cu_mem_create|resume)\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY",),
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        engine.release()
        held = allocate(free_bytes() - 512 * MIB if broken else 512 * MIB)
        print(f"the trainer holds {held.nbytes / GIB:.2f} GiB, free are {free_bytes() / GIB:.2f} GiB", flush=True)
        engine.resume()
        print("the engine is resumed", flush=True)
