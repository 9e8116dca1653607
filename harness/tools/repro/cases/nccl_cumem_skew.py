"""sglang.Engine sets NCCL_CUMEM_ENABLE=0 in the process that builds it, one rank of its group. NCCL reads it when a
communicator is made, as a rule later, so that two ranks of one communicator offer each other different kinds of memory."""

import os

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.gpu import nccl_ranks

CASE = Case(
    title="ranks that differ in NCCL_CUMEM_ENABLE cannot gather",
    needs="several_gpus",
    broken="NCCL_CUMEM_ENABLE=0 on rank 0, as the engine's start leaves it, and 1 on rank 1",
    healthy="NCCL_CUMEM_ENABLE=0 on both ranks",
    signature=(r"ncclUnhandledCudaError|[Cc]uda failure.*invalid argument|ncclInternalError|ncclSystemError",),
    seconds=90,
)


def program(broken: bool) -> None:
    def prepare(rank: int) -> None:
        os.environ["NCCL_CUMEM_ENABLE"] = str(int(broken and rank == 1))

    nccl_ranks(prepare)


if __name__ == "__main__":
    variant.main(program)
