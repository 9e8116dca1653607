"""A handle of GPU memory opens on the wrong GPU if sender and receiver number GPUs differently.

A rank that sees one GPU calls it 0, and so does a scheduler that sees all. SGLang patches torch: handles then name a UUID.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.gpu_helpers import hand_over, two_gpus

CASE = Case(
    needs="several_gpus",
    broken="torch as it is: a handle names its GPU by the sender's number",
    healthy="patched as SGLang does it: by UUID",
    signature=(r"WRONG GPU|CUDA error|invalid (resource handle|device context|argument|device ordinal)",),
    requires=("sglang",),
    timeout_seconds=120,
)


def program(broken: bool) -> None:
    first, second = two_gpus()
    hand_over(sender_sees=second, receiver_sees=f"{first},{second}", by_uuid=not broken)
