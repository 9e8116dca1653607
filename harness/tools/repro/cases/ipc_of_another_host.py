"""A handle of GPU memory does not open on a host without that GPU.

Two hosts are emulated by CUDA_VISIBLE_DEVICES. Each rank must get the handle of its own host, not that of rank 0.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.gpu_helpers import hand_over, two_gpus

CASE = Case(
    needs="several_gpus",
    broken="the handle of the other host's trainer rank",
    healthy="the handle of a trainer rank with the same GPU",
    signature=(r"Invalid device_uuid=",),
    failure="cross-node-ipc",
    requires=("sglang",),
    timeout_seconds=120,
)


def program(broken: bool) -> None:
    first, second = two_gpus()
    hand_over(sender_sees=second if broken else first, receiver_sees=first, by_uuid=True)
