"""An engine cannot resume while torch's allocator keeps what the trainer has freed."""

from harness.runtime.units import GIB, MIB
from harness.tools.repro.case import Case
from harness.tools.repro.gpu_helpers import allocate, free_bytes
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="resume while the freed blocks are cached",
    healthy="torch.cuda.empty_cache(), then resume",
    signature=(r"func=(cu_mem_create|resume)\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory",),
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    import torch

    with tiny_engine() as engine:
        engine.release()
        allocate(free_bytes() - 512 * MIB)  # freed at once, and cached
        print(f"free beside the trainer's cache: {free_bytes() / GIB:.2f} GiB", flush=True)
        if not broken:
            torch.cuda.empty_cache()
        print(f"free when the engine resumes: {free_bytes() / GIB:.2f} GiB", flush=True)
        engine.resume()
        print("the engine is resumed", flush=True)
