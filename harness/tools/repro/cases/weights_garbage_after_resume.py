"""An engine that was resumed and not updated generates with weights that no process wrote.

A release drops them, by design.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import LOG_PROBS, checkpoint_tensors, tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="release, resume, generate",
    healthy="release, resume, update, generate",
    number=LOG_PROBS,
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        trainer = engine.trainer(seed=0)  # what the engine was started with
        engine.release()
        engine.resume()
        if not broken:
            engine.update(checkpoint_tensors(trainer))
        engine.print_difference(trainer)
