"""An engine argument of another release is a TypeError, or an error of its own, deep inside SGLang.

disable_piecewise_cuda_graph came and went; an argument of no release stands for it, to fail alike with all.
"""

from harness.tools.repro.case import Case

CASE = Case(
    broken="the argument is passed as it is",
    healthy="it is looked up in this sglang first, and dropped",
    signature=(r"[Uu]nexpected keyword argument|[Uu]nknown (argument|field)|no attribute 'disable_piece",),
    requires=("sglang",),
)
ARGUMENT = "disable_piecewise_cuda_graph_of_0_5_13"


def program(broken: bool) -> None:
    from harness.runtime.cpu_standins import activate

    activate()
    from harness.rollout import sglang_api
    from harness.rollout.sglang_api import source

    given = {"model_path": "dummy", "load_format": "dummy", ARGUMENT: True}
    if not broken:
        given, dropped = sglang_api.check_arguments(sglang_api.probe(), {"model_path": "dummy"}, {ARGUMENT: True})
        print("dropped:", *dropped)
        return
    source.load("srt/server_args.py", "ServerArgs")(**given)
