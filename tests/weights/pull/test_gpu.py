"""The kernel and CUDA IPC on a real GPU: casts bit for bit as Tensor.copy_, memory of another process."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from harness.weights.pull.copies import copies_of
from harness.weights.pull.gpu_memory import CudaCallFailed, open_allocation
from harness.weights.pull.shards import OpenShards, export_shards
from harness.weights.pull.tiles import Move
from harness.weights.regions import Region

pytestmark = pytest.mark.gpu

KINDS = [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float32, torch.float16, torch.float16),
    (torch.float32, torch.float16, torch.float32),
    (torch.float16,) * 3,
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16,) * 3,
    (torch.float32,) * 3,
    (torch.int64,) * 3,
    (torch.uint8,) * 3,
]


@pytest.mark.parametrize(("held", "sent", "kept"), KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "room", "skip"), [(20, 600, 600, 0), (70, 100, 104, 8), (3, 5, 7, 1), (1, 9000, 9000, 0)]
)
def test_the_kernel_copies_and_casts_as_torch_does(
    held: torch.dtype, sent: torch.dtype, kept: torch.dtype, rows: int, columns: int, room: int, skip: int
) -> None:
    torch.manual_seed(rows)
    bits = torch.randint(-(1 << 62), 1 << 62, (rows * room + skip,), device="cuda")
    values = (
        (bits.double() / 2**60 * 10 ** (bits % 9 - 4).double()).to(held) if held.is_floating_point else bits.to(held)
    )
    source = values[skip:].reshape(rows, room)[:, :columns]
    target = torch.zeros(columns, rows, dtype=kept, device="cuda").T  # turned, and then as it is
    for into in (target, torch.zeros(rows, columns, dtype=kept, device="cuda")):
        axes = zip(source.shape, source.stride(), into.stride(), strict=True)
        by_target = tuple(sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[2]))
        move = Move(Region(0, 0, 0, by_target), source.data_ptr(), into.data_ptr(), held, sent, kept)
        copies_of([move], torch.device("cuda", 0)).run()
        assert torch.equal(into, source.to(sent).to(kept))


def _read(line: Connection) -> None:
    """In another process: what the first of the exported tensors holds, and what an unknown handle does."""
    torch.zeros(1, device="cuda")  # opening memory of another process takes a CUDA context, as every scheduler has one
    shards = OpenShards([line.recv()])
    address, dtype = shards.find(0, "b")
    found = torch.zeros(1000, dtype=dtype, device="cuda")
    move = Move(Region(0, 0, 0, ((1000, 1, 1),)), address, found.data_ptr(), dtype, dtype, dtype)
    copies_of([move], torch.device("cuda", 0)).run()
    try:
        open_allocation(bytes(64))
        refused = ""
    except CudaCallFailed as error:
        refused = str(error)
    line.send((found.tolist(), refused))
    shards.close()


def test_another_process_reads_what_was_exported_and_an_unknown_handle_is_named() -> None:
    live = {"a": torch.arange(3000.0, device="cuda"), "b": torch.arange(1000.0, device="cuda") + 7}
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_read, args=(theirs,))
    process.start()
    theirs.close()  # so that recv() ends if the process does
    ours.send(export_shards(live, 0, "here", "0", 1))
    found, refused = ours.recv()
    process.join()
    assert found == live["b"].tolist()
    assert refused.startswith("cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID")
