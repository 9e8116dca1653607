"""A release without the memory saver answers success and frees nothing."""

from harness.runtime.units import GIB
from harness.tools.repro.case import Case, Number
from harness.tools.repro.gpu_helpers import free_bytes
from harness.tools.repro.tiny_engine import prepare_process, tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="enable_memory_saver=False",
    healthy="enable_memory_saver=True",
    number=Number(name="share of the engine's memory held after the release", broken_above=0.9, healthy_below=0.5),
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    prepare_process()
    before = free_bytes()
    with tiny_engine(enable_memory_saver=not broken) as engine:
        engine.generate()
        resumed = before - free_bytes()
        engine.release()
        released = before - free_bytes()
        print(f"the engine held {resumed / GIB:.2f} GiB, and {released / GIB:.2f} GiB after the release")
        print(f"share of the engine's memory held after the release: {released / resumed:.3f}", flush=True)
