"""sglang ships no VerlEngine any more.

Every script of spring 2025 imports it.
"""

from harness.tools.repro.case import Case

CASE = Case(
    broken="VerlEngine is imported from sglang",
    healthy="VerlEngine is imported from this harness",
    signature=(r"No module named 'sglang.srt.entrypoints.verl_engine'",),
    requires=("sglang",),
)


def program(broken: bool) -> None:
    from harness.runtime.cpu_standins import activate

    activate()
    if broken:
        from harness.rollout.sglang_api import source

        print(source.load("srt/entrypoints/verl_engine.py", "VerlEngine"))
    else:
        from harness.rollout.verl_engine import VerlEngine

        print(VerlEngine)
