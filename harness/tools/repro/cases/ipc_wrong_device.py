"""A trainer rank that sees one GPU calls it 0; a scheduler that sees all of them opens its handle on its own GPU 0. SGLang's
patch of torch makes handles name GPUs by UUID."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.gpu import hand_over, visible

CASE = Case(
    title="a handle of GPU memory is opened on the wrong GPU, where sender and receiver number GPUs differently",
    needs="several_gpus",
    broken="torch as it is: a handle names its GPU by the sender's number",
    healthy="patched as SGLang does it: by UUID",
    signature=(r"WRONG GPU|CUDA error|invalid (resource handle|device context|argument|device ordinal)",),
    requires=("sglang",),
    seconds=120,
)


def program(broken: bool) -> None:
    first, second = visible()[:2]
    hand_over(sender_sees=second, receiver_sees=f"{first},{second}", patched=not broken)


if __name__ == "__main__":
    variant.main(program)
