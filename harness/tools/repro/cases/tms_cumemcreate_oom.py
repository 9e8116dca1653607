"""The trainer still holds its tensors when the engine wakes: plain out of memory, said by the memory saver's C++ in the
scheduler, without a Python traceback."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine
from harness.tools.repro.gpu import GIB, MIB, filler, free_bytes

CASE = Case(
    title="an engine that wakes beside a trainer that holds its memory dies in cu_mem_create",
    needs="one_gpu",
    broken="the trainer holds all but 512 MiB of what is free",
    healthy="the trainer holds 512 MiB",
    signature=(r"func=(cu_mem_create|resume)\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY",),
    requires=("torch_memory_saver",),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        engine.release()
        held = filler(free_bytes() - 512 * MIB if broken else 512 * MIB)
        print(f"the trainer holds {held.nbytes / GIB:.2f} GiB, free are {free_bytes() / GIB:.2f} GiB", flush=True)
        engine.resume()
        print("the engine is resumed", flush=True)


if __name__ == "__main__":
    variant.main(program)
