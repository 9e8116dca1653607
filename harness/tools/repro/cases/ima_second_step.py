"""The first step finds the engine resumed, and its update works whatever is resumed; the second finds it released. Without
"weights" among what is resumed the update writes to addresses at which nothing is mapped: an illegal access from a kernel,
an invalid argument from a copy."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="the second step's update is an illegal memory access where only the KV cache was resumed",
    needs="one_gpu",
    broken='resume(["kv_cache"]) before the update',
    healthy="resume of all before the update",
    signature=(r"an illegal memory access was encountered|CUDA error: invalid argument",),
    requires=("torch_memory_saver", "sglang>=0.4.8"),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        for step in (1, 2, 3):
            if step > 1:
                engine.resume(["kv_cache"] if broken else None)
            trainer = engine.trainer(seed=step)
            engine.update(checkpoint(trainer))
            engine.print_difference(trainer)
            print(f"step {step} passed", flush=True)
            engine.release()


if __name__ == "__main__":
    variant.main(program)
