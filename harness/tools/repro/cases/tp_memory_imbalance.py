"""A tensor of a trainer on one of an engine's two GPUs: SGLang refuses to start where one has less than 90 % of the other's
free memory."""

import os

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine
from harness.tools.repro.gpu import filler, free_bytes

CASE = Case(
    title="an engine over two GPUs does not start where a trainer holds 15 % of one of them",
    needs="several_gpus",
    broken="the trainer holds 15 % of one GPU",
    healthy="the trainer holds 2 % of it",
    signature=(r"Error: The memory capacity is unbalanced",),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    for name in list(os.environ):
        if "TP_MEMORY_INBALANCE_CHECK" in name:
            del os.environ[name]
    held = filler(int(free_bytes(1) * (0.15 if broken else 0.02)), gpu=1)
    print(f"the trainer holds {held.nbytes} bytes of GPU 1", flush=True)
    with tiny_engine(tp_size=2) as engine:
        engine.generate()


if __name__ == "__main__":
    variant.main(program)
