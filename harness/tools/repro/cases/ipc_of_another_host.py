"""Two hosts emulated by CUDA_VISIBLE_DEVICES: the engine's rank on one of them gets the handle of the trainer rank on the
other, as it does where rank 0's payload is sent to all. Each rank must get the one of its own host."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.gpu import hand_over, visible

CASE = Case(
    title="a handle of GPU memory does not open on a host without that GPU",
    needs="several_gpus",
    broken="the handle of the other host's trainer rank",
    healthy="the handle of a trainer rank with the same GPU",
    signature=(r"Invalid device_uuid=",),
    failure="cross-node-ipc",
    requires=("sglang",),
    seconds=120,
)


def program(broken: bool) -> None:
    first, second = visible()[:2]
    hand_over(sender_sees=second if broken else first, receiver_sees=first, patched=True)


if __name__ == "__main__":
    variant.main(program)
