"""What an exported program has beside functions of launch/minimal.py: phases and timeouts, other ways to start and to sync.

program.py pastes from the source of this module, which only tests import: from "Of every program" on, and the imports that
are used. A function NAME__WORD takes the place of minimal.py's NAME.
"""
# ruff: noqa: F401, F403, F405

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.metadata
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from minimal import *

    COLOCATE, GIVEN, NAMES, PP, PP_FIRST, TIMEOUT = True, [""], [""], 1, False, 600.0
    MODEL_CONFIG, TIMEOUTS = dict[str, Any](), dict[str, float]()

# Of every program.
RANK, LOCAL_RANK, LOCAL_WORLD = (int(os.environ.get(key, 0)) for key in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
PHASE: dict[str, Any] = {"name": "start", "place": "start", "began": time.monotonic()}
WeightsDidNotArrive = type("WeightsDidNotArrive", (RuntimeError,), {})


def add_stand_ins() -> None:
    """Put in place what SGLang's CPU mode imports, and PyPI has in no CPU build."""
    made: Any = types.ModuleType("sgl_kernel")
    made.__spec__, made.__path__ = importlib.machinery.ModuleSpec("sgl_kernel", None), []
    vars(made).update(dict.fromkeys(NAMES))  # imported and never called
    moving: Any = types.ModuleType("sgl_kernel.kvcacheio")
    moving.__getattr__ = lambda name: None  # whatever 0.5.12 and older import of it
    sys.modules |= {"sgl_kernel": made, "sgl_kernel.kvcacheio": moving}
    if "+cpu" not in importlib.metadata.version("torchvision"):
        for name in ("nms", "qnms"):  # PyPI's is built for CUDA, and cannot bring its own beside a CPU torch
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def register_absorbed_mla() -> None:
    """Give DeepSeek's prefill on torch_native, which SGLang has no method for, the absorbed one, which works."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def phase(name: str, step: int | None = None) -> None:
    """Begin a phase of the run."""
    PHASE.update(name=name, place=name if step is None else f"{name} of step {step}", began=time.monotonic())
    if RANK == 0:
        print(PHASE["place"], flush=True)


def leave(code: int, text: str = "") -> None:
    """End this rank, and the engine's processes that it started."""
    print(text, end="", file=sys.stderr, flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(code)


def watch() -> None:
    """Show where this rank is once its phase's timeout has passed, and end it with 124; in a thread."""
    while time.monotonic() - PHASE["began"] < TIMEOUTS.get(PHASE["name"], TIMEOUT):
        time.sleep(0.2)
    faulthandler.dump_traceback()
    leave(124, f"rank {RANK} FAILED: its timeout passed in {PHASE['place']}\n")


def engine_died(signum: int, frame: object) -> None:
    """End this rank; SGLang's handler of the SIGQUIT that a dying scheduler sends."""
    leave(1, f"rank {RANK} FAILED: an engine process died in {PHASE['place']}; see above\n")


def change(model: nn.Module, seed: int) -> None:
    """Multiply every element by 9/8 or 7/8, in place of learning: an update that does not arrive must show."""
    for index, tensor in enumerate(model.state_dict(keep_vars=True).values()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        own = RANK + 1 if isinstance(tensor, DTensor) else 0  # what is whole on every rank must stay the same there
        generator = torch.Generator(local.device).manual_seed(seed * 1_000_003 + index * 1009 + own)
        coin = torch.randint(0, 2, local.shape, generator=generator, device=local.device)
        local.detach().mul_((coin * 2 - 1) / 8 + 1)


def sync_weights__bucket(engine: Any, mesh: DeviceMesh, model: nn.Module) -> None:
    """Load the actor's weights into every engine, one flattened bucket for each item of checkpoint_tensors; collective."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    call(engine, mesh, "begin_weight_update")  # this and its end since 0.5.21
    for tensors in checkpoint_tensors(model):
        bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
        sent = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        ranks: list[Any] = [None] * mesh.size(1)
        dist.all_gather_object(ranks, MultiprocessingSerializer.serialize(sent), group=mesh.get_group("tp"))
        options = {"load_format": "flattened_bucket", "flush_cache": True}
        call(engine, mesh, "update_weights_from_tensor", named_tensors=ranks, **options)
    call(engine, mesh, "end_weight_update")


def sync_weights__disk(engine: Any, mesh: DeviceMesh, model: Any) -> None:
    """Load the actor's weights into every engine from a checkpoint; collective. All hosts must see the folder."""
    from safetensors.torch import save_file

    folder = Path(f"repro-{os.environ['MASTER_PORT']}").resolve()
    checkpoint = {name: each.cpu() for tensors in checkpoint_tensors(model) for name, each in tensors.items()}
    if RANK == 0:
        model.config.save_pretrained(folder)
        save_file(checkpoint, folder / "model.safetensors", {"format": "pt"})
    dist.barrier()
    call(engine, mesh, "update_weights_from_disk", model_path=str(folder), load_format="auto")
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def free_address() -> str:
    """Return this host's address on the way to MASTER_ADDR, and a port."""
    family, kind, _, _, master = min(socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM))
    with socket.socket(family, kind) as way, socket.create_server(("", 0)) as probe:
        way.connect(master)
        host = way.getsockname()[0]
        return f"{f'[{host}]' if ':' in host else host}:{probe.getsockname()[1]}"


def start_engine__anywhere(settings: Settings, mesh: DeviceMesh, folder: str) -> Any:
    """Start the engine of this rank's group, a node on each of its hosts; return it on nodes' first ranks; collective."""
    dp = mesh.get_local_rank("dp")
    engine_ranks = mesh.mesh[dp] if PP_FIRST else mesh.mesh[dp].view(-1, PP).T.flatten()
    ranks = engine_ranks.tolist()  # in SGLang's order, stage by stage
    hosts = sorted({rank // LOCAL_WORLD for rank in ranks})
    here = [rank % LOCAL_WORLD for rank in ranks if rank // LOCAL_WORLD == RANK // LOCAL_WORLD]
    # One key for all ranks: an engine fetches CPU tensors from each of them, and must have its key.
    shared: list[Any] = [free_address(), bytes(multiprocessing.current_process().authkey)]
    dist.broadcast_object_list(shared, group=mesh.get_group("tp"), group_src=0)
    multiprocessing.current_process().authkey = shared[1]
    visible: list[str | None] = [None] * mesh.size()
    dist.all_gather_object(visible, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if here[0] != LOCAL_RANK:
        return None
    placement = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}  # or the Engine of a later host never returns
    if DEVICE == "cuda":
        host = visible[RANK - LOCAL_RANK :][:LOCAL_WORLD]
        host, offset = (host, 0) if COLOCATE else (host * 2, LOCAL_WORLD)  # trainers use the first half of the GPUs
        placement["CUDA_VISIBLE_DEVICES"] = engine_gpus(host, [rank + offset for rank in here])
        placement["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    else:
        cores = sorted(os.sched_getaffinity(0))
        bind = "|".join(str(cores[rank % len(cores)]) for rank in here)
        placement |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": "no-nccl-on-cpu"}
        placement |= {"SGLANG_CPU_OMP_THREADS_BIND": bind, "TORCHDYNAMO_DISABLE": "1"}
    before = dict(os.environ)
    os.environ.clear()
    os.environ |= clean_environment(before) | placement
    try:
        import sglang
        from sglang.srt.server_args import ServerArgs

        known = signature(ServerArgs).parameters
        for name in set(GIVEN) - set(known):
            leave(2, f"error: engine.args.{name}: sglang {sglang.__version__} has no such engine argument.\n")
        arguments = {key: value for key, value in ENGINE_ARGUMENTS.items() if key in known}
        arguments |= {"tp_size": settings.tp // PP, "pp_size": PP, "dist_init_addr": shared[0]}
        arguments |= {"nnodes": len(hosts), "node_rank": hosts.index(RANK // LOCAL_WORLD)}
        arguments |= {"dtype": str(DTYPE).split(".")[1], "random_seed": settings.seed + dp}
        return sglang.Engine(model_path=folder, custom_sigquit_handler=engine_died, **arguments)
    finally:  # what SGLang sets for itself (NCCL_*) must not stay: NCCL in the trainer needs the same on all ranks
        os.environ.clear()
        os.environ |= before


def write_tiny__random(name: str, folder: str, seed: int) -> str:
    """Write a config alone: the first sync brings the engine its weights."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **MODEL_CONFIG))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def build_actor__random(folder: str, learning_rate: float) -> tuple[nn.Module, None]:
    """Make an actor whose ranks fill their own shards, and no optimizer; collective."""
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for module in [*model.base_model.layers, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device=DEVICE)
    rotary = model.base_model.rotary_emb
    model.base_model.rotary_emb = type(rotary)(config=config).to(DEVICE)  # its buffers are computed
    torch.manual_seed(RANK)
    for name, tensor in model.state_dict().items():
        deviation = config.initializer_range if tensor.ndim > 1 else 0.1 * isinstance(tensor, DTensor)
        local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.normal_(float(name.endswith("norm.weight")), deviation)
    return model, None


def train__in_phases(settings: Settings, mesh: DeviceMesh, engine: Any, folder: str) -> None:
    """Run all steps, each with a check of the weights that it sent; collective."""
    vocab_size, worst = transformers.AutoConfig.from_pretrained(folder).vocab_size, 0.0
    phase("first_release")
    memory(engine, mesh, "release", "kv_cache", "weights")
    phase("build_trainer")
    model, _ = build_actor(folder, settings.learning_rate)
    for step in range(settings.steps):
        phase("resume_weights", step)
        memory(engine, mesh, "resume", "weights")
        phase("sync", step)
        sync_weights(engine, mesh, model)
        phase("resume_kv_cache", step)
        memory(engine, mesh, "resume", "kv_cache")
        phase("generate", step)
        batch = rollout(engine, mesh, settings, step, vocab_size)
        phase("release", step)
        memory(engine, mesh, "release", "kv_cache", "weights")
        phase("old_log_probs", step)
        difference = log_prob_difference(model, batch, settings)
        if difference > settings.tolerance:
            off = f"{difference:.2e} in the mean, {settings.tolerance:g} is allowed"
            raise WeightsDidNotArrive(f"step {step}: the engine's log-probs are off by {off}")
        worst = max(worst, difference)
        phase("update_actor", step)
        change(model, settings.seed + step + 1)
    if RANK == 0:
        print(f"PASSED: {settings.steps} of {settings.steps} steps; worst log-prob difference {worst:.1e} nats")


def main__of_run() -> None:
    """Build everything, run, and end everything."""
    threading.Thread(target=watch, daemon=True).start()
    settings = Settings()
    if DEVICE == "cuda":
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # IPC handles name GPUs by UUID: trainer and engine number them differently
        torch.cuda.set_device(LOCAL_RANK % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * max([TIMEOUT, *TIMEOUTS.values()])))
    phase("meet")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // settings.tp, settings.tp), mesh_dim_names=("dp", "tp"))
    with tempfile.TemporaryDirectory() as new:
        folder = write_tiny(settings.model, new, settings.seed) if MODEL_CONFIG else settings.model
        phase("start_engine")
        engine = start_engine(settings, mesh, folder)
        dist.barrier()
        train(settings, mesh, engine, folder)
        phase("shutdown")
        if engine:
            engine.shutdown()
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        leave(1, f"{traceback.format_exc()}rank {RANK} FAILED in {PHASE['place']}: {type(error).__name__}: {error}\n")
