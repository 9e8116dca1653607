"""PYTORCH_CUDA_ALLOC_CONF as many trainers want it, inherited by the engine's schedulers, in which the memory saver then
refuses to work."""

import os

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="the memory saver refuses to work with expandable_segments",
    needs="one_gpu",
    broken="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    healthy="PYTORCH_CUDA_ALLOC_CONF is not set",
    signature=(r"TorchMemorySaver is disabled for the current process because expandable_segments",),
    requires=("torch_memory_saver",),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if broken:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with tiny_engine() as engine:
        engine.release()
        engine.resume()
        print("the engine has slept and is resumed", flush=True)


if __name__ == "__main__":
    variant.main(program)
