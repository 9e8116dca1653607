"""The second step's update is an illegal memory access if only the KV cache was resumed.

The first step finds the engine resumed, the second finds it released: the update writes to addresses at which nothing is
mapped. A kernel reports an illegal access, a copy an invalid argument.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import checkpoint_tensors, tiny_engine

CASE = Case(
    needs="one_gpu",
    broken='resume(["kv_cache"]) before the update',
    healthy="resume of all before the update",
    signature=(r"an illegal memory access was encountered|CUDA error: invalid argument",),
    requires=("torch_memory_saver", "sglang>=0.4.8"),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        for step in (1, 2, 3):
            if step > 1:
                engine.resume(["kv_cache"] if broken else None)
            trainer = engine.trainer(seed=step)
            engine.update(checkpoint_tensors(trainer))
            engine.print_difference(trainer)
            print(f"step {step} passed", flush=True)
            engine.release()
