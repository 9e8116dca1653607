"""The trainer has freed its tensors, and torch's allocator keeps their blocks; the driver has nothing to give to an engine
that wakes."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine
from harness.tools.repro.gpu import GIB, MIB, filler, free_bytes

CASE = Case(
    title="an engine cannot wake while torch's allocator keeps what the trainer has freed",
    needs="one_gpu",
    broken="resume while the freed blocks are cached",
    healthy="torch.cuda.empty_cache(), then resume",
    signature=(r"func=(cu_mem_create|resume)\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory",),
    requires=("torch_memory_saver",),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    import torch

    with tiny_engine() as engine:
        engine.release()
        filler(free_bytes() - 512 * MIB)  # freed at once, and cached
        print(f"free beside the trainer's cache: {free_bytes() / GIB:.2f} GiB", flush=True)
        if not broken:
            torch.cuda.empty_cache()
        print(f"free when the engine wakes: {free_bytes() / GIB:.2f} GiB", flush=True)
        engine.resume()
        print("the engine is resumed", flush=True)


if __name__ == "__main__":
    variant.main(program)
