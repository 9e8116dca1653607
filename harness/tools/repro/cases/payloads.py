"""Serialized weights that the receiver cannot open, or opens elsewhere than it should."""

import base64
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from harness.rollout import sglang_api
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import run_on_two_hosts, run_ranks
from harness.tools.repro.predictable_drafts import ENGINE_ARGUMENTS, make_predictable
from harness.tools.repro.tiny_engine import PROMPT, checkpoint_tensors, prepare_process, tiny_engine

SHARED_TENSORS = 200


@Case(
    broken="each rank has a different authkey, as processes of torchrun do",
    healthy="all ranks have one authkey",
    signature=(r"AuthenticationError: digest (sent|received) was",),
)
def cpu_payload_authkey(broken: bool) -> None:
    """A payload in host memory opens only in a process with the sender's authkey."""

    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        multiprocessing.current_process().authkey = os.urandom(32) if broken else b"one for all"
        dist.init_process_group("gloo")
        payload = [sglang_api.serialize(torch.arange(6.0)) if rank == 0 else b""]
        dist.broadcast_object_list(payload, src=0)
        if rank == 1:
            print("rank 1 has", sglang_api.deserialize(payload[0]).tolist(), flush=True)
        dist.barrier()

    run_ranks(work)


@Case(
    needs="hosts",
    broken="rank 0's payload for the ranks of both hosts",
    healthy="each host's rank opens its own payload",
    signature=(r"rank 1: RuntimeError: unable to open shared memory object",),
    new_python=True,
)
def cross_node_ipc(broken: bool) -> None:
    """A payload of rank 0 does not open on another host; each host needs its own."""
    if "RANK" not in os.environ:
        run_on_two_hosts()
    import torch
    import torch.distributed as dist
    import torch.multiprocessing

    # The other strategy goes through a socket in the file system, which emulated hosts share and real ones do not.
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group("gloo")
    rank, weight = dist.get_rank(), torch.arange(6.0)
    payloads: list[Any] = [None, None]
    dist.all_gather_object(payloads, sglang_api.serialize(weight))
    if rank == 1:
        payload = payloads[0 if broken else 1]
        try:  # in another process, as a scheduler does: the sender's own would not need the handle
            with multiprocessing.get_context("fork").Pool(1) as scheduler:
                print("rank 1 has", scheduler.apply(sglang_api.deserialize, (payload,)).tolist(), flush=True)
        except Exception as error:
            print(f"rank 1: {type(error).__name__}: {error}", flush=True)
            raise
    dist.barrier()


@Case(
    needs="several_gpus",
    broken="the handle of the other host's trainer rank",
    healthy="the handle of a trainer rank with the same GPU",
    signature=(r"Invalid device_uuid=",),
    failure="cross-node-ipc",
)
def ipc_of_another_host(broken: bool) -> None:
    """A handle of GPU memory does not open on a host without that GPU; CUDA_VISIBLE_DEVICES emulates two hosts."""
    _hand_over(sender=[1] if broken else [0], receiver=[0], by_uuid=True)


@Case(
    needs="several_gpus",
    broken="torch as it is: a handle names its GPU by the sender's number",
    healthy="patched as SGLang does it: by UUID",
    signature=(r"WRONG GPU|CUDA error|invalid (resource handle|device context|argument|device ordinal)",),
)
def ipc_wrong_device(broken: bool) -> None:
    """A handle of GPU memory opens on the wrong GPU if sender and receiver number GPUs differently."""
    _hand_over(sender=[1], receiver=[0, 1], by_uuid=not broken)


def _hand_over(sender: list[int], receiver: list[int], by_uuid: bool) -> None:
    """Open a tensor of the sender's first GPU in the receiver, with handles by UUID or number; each sees these GPUs."""

    def work(rank: int) -> None:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[n] for n in (sender if rank else receiver))
        import torch
        import torch.distributed as dist

        def uuid(tensor: torch.Tensor) -> str:
            return str(torch.cuda.get_device_properties(tensor.device).uuid)

        if by_uuid:
            sglang_api.patch_reductions()
        dist.init_process_group("gloo")
        weight = torch.arange(6.0, device="cuda:0")
        handles: list[Any] = [None, None]
        dist.all_gather_object(handles, (sglang_api.serialize(weight), uuid(weight)))
        if rank == 0:
            payload, sent_from = handles[1]
            opened = sglang_api.deserialize(payload)
            print(f"sent from GPU {sent_from}, opened on {uuid(opened)}", flush=True)
            if sent_from != uuid(opened):
                print("WRONG GPU: the handle was opened on another than it was sent from", flush=True)
            print("it holds", opened.tolist(), flush=True)
        dist.barrier()  # the sender's memory must live until then

    run_ranks(work)


@Case(
    broken="an update from tensors",
    healthy="an update from disk",
    signature=(r"KeyError: \d+|EOFError|unable to open shared memory object",),
    engine=True,
)
def pp_payload_opened_twice(broken: bool) -> None:
    """On CPU two pipeline stages open one payload, and the second stage dies after the update answered success."""
    with tiny_engine(pp_size=2) as engine:
        if engine.device == "cuda":
            raise UnsupportedEnvironment("a payload in GPU memory opens any number of times; hide the GPUs.")
        if broken:
            engine.update(checkpoint_tensors(engine.trainer(seed=1)))
        else:
            sglang_api.call(engine.engine, "update_weights_from_disk", str(engine.folder), "auto")
        print("the update answered success", flush=True)
        time.sleep(2)  # stage 1 has tried to open it by then
        engine.engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 4, "ignore_eos": True})


@Case(
    broken="each tensor is in a payload of its own, as trainers of several ranks send it",
    healthy="all tensors are in one payload",
    signature=(r"EOFError",),
    engine=True,
    requires=("sglang>=0.5.23",),
)
def mtp_ipc_double_open(broken: bool) -> None:
    """With a draft model SGLang opens the payload of a tensor for each of two models, and on CPU the second finds
    none."""
    tensors: dict[str, Any] = {}

    def prepare(folder: Path) -> None:
        tensors.update(make_predictable(folder))

    with tiny_engine("deepseek_v3", prepare=prepare, **ENGINE_ARGUMENTS) as engine:
        if engine.device == "cuda":
            raise UnsupportedEnvironment("a payload in GPU memory opens any number of times; hide the GPUs.")
        if broken:
            apart = {name: sglang_api.serialize(each) for name, each in tensors.items()}
            engine.update([(name, sglang_api.local_serialized_tensor(engine.api, [apart[name]])) for name in apart])
        else:
            engine.update(list(tensors.items()))
        print("updated", flush=True)


class Weights(list[str]):
    """A class of the script."""


@Case(
    broken="the payload is of a class of the script",
    healthy="the payload is a list",
    signature=(r"unsafe class|not allowed|[Bb]locked",),
)
def safe_unpickler(broken: bool) -> None:
    """SGLang's unpickler refuses a payload with a class of your own."""
    prepare_process()
    names = ["lm_head.weight"]
    payload = base64.b64encode(sglang_api.serialize(Weights(names) if broken else names)).decode()
    serializer = sglang_api.load("srt/utils/common.py", "MultiprocessingSerializer")
    print("opened:", serializer.deserialize(payload))


@Case(
    broken="a limit of 64 file descriptors",
    healthy="the limit that the process has",
    signature=(r"Too many open files",),
)
def too_many_open_files(broken: bool) -> None:
    """Each tensor in shared memory takes a file descriptor of its process, until there is none left."""
    import resource

    import torch

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 2 * SHARED_TENSORS:
        raise UnsupportedEnvironment(f"the limit of open files must be at least {2 * SHARED_TENSORS}; it is {limit}")
    if broken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    shared = [torch.ones(4).share_memory_() for _ in range(SHARED_TENSORS)]
    print(f"{len(shared)} tensors are shared", flush=True)
