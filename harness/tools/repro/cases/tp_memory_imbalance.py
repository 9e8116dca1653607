"""An engine over two GPUs does not start where a trainer holds 15 % of one of them.

SGLang refuses GPUs of which one has less than 90 % of the other's free memory.
"""

import os

from harness.tools.repro.case import Case
from harness.tools.repro.gpu_helpers import allocate, free_bytes
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    needs="several_gpus",
    broken="the trainer holds 15 % of one GPU",
    healthy="the trainer holds 2 % of it",
    signature=(r"Error: The memory capacity is unbalanced",),
    engine=True,
)


def program(broken: bool) -> None:
    for name in list(os.environ):
        if "TP_MEMORY_INBALANCE_CHECK" in name:
            del os.environ[name]
    held = allocate(int(free_bytes(1) * (0.15 if broken else 0.02)), gpu=1)
    print(f"the trainer holds {held.nbytes} bytes of GPU 1", flush=True)
    with tiny_engine(tp_size=2) as engine:
        engine.generate()
