"""Reinforcement learning with SGLang on torchrun alone: the whole idea in one file, to be read from top to bottom.

    torchrun --nproc-per-node=2 launch/minimal.py --model qwen2 --tp 2 --steps 3

All ranks of one host together train an actor, sharded by FSDP2. The ranks also form groups of tp ranks. Each group has
one sglang.Engine, which runs on the GPUs of these ranks; the first rank of the group starts it and calls it. One step:

    resume weights -> sync -> resume KV cache -> rollout -> release -> log-prob check -> advantages -> update

How do we know that a sync worked? SGLang answers "Success" even to weights that it ignores. So the engine starts with
dummy weights, and after every sync the log-probs that it reports for the tokens it sampled must equal the actor's.

Prints what it does as it goes, and PASSED (exit code 0) or FAILED (1) at the end. Runs without a GPU, too.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any
from unittest.mock import patch

STARTED = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run can vary; the first five are options of the command line."""

    model: str = "qwen2"  # qwen2 or deepseek_v3 (tiny, random, made on the spot), or a checkpoint folder
    tp: int = 2  # ranks of an engine; the number of engines follows from the number of ranks
    steps: int = 3
    learning_rate: float = 1e-3  # large: a sync is proven only if the update before it moved the log-probs
    skip_sync: int = -1  # a fault to plant: leave out the sync of this step, and the check must fail
    seed: int = 1
    prompts: int = 5  # per engine and step; the last one is held out of the training
    responses: int = 8  # per prompt: a GRPO group
    prompt_tokens: int = 8
    response_tokens: int = 16
    temperature: float = 1.0
    epochs: int = 2  # optimizer steps per rollout; in the second one ratios differ from 1
    clip: float = 0.2
    max_grad_norm: float = 1.0


ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run."""
MODELS = ("qwen2", "deepseek_v3")
"""Architectures of which a tiny model can be made."""


def parse(arguments: list[str]) -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "tp", "steps", "learning_rate", "skip_sync"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"({default})")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.tp < 1 or settings.steps < 1:
        parser.error(f"--tp and --steps must be at least 1, got {settings.tp} and {settings.steps}")
    if settings.skip_sync >= settings.steps:
        parser.error(f"--skip-sync must be below --steps = {settings.steps}, got {settings.skip_sync}")
    if settings.model not in MODELS and not os.path.isfile(os.path.join(settings.model, "config.json")):
        parser.error(f"--model must be {' or '.join(MODELS)}, or a folder with a config.json, got {settings.model}")
    return settings


def say(text: str) -> None:
    """Print a line with the seconds since the start, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


# Before the imports below, which take seconds: --help needs none of them, and the user sees at once that something
# happens.
SETTINGS = parse(sys.argv[1:]) if __name__ == "__main__" else Settings()
if __name__ == "__main__":
    if "RANK" not in os.environ:
        print("error: start this with torchrun --nproc-per-node=2 launch/minimal.py", file=sys.stderr)
        sys.exit(2)
    say("importing torch, transformers and SGLang, which takes seconds")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this rank without a traceback
    gc.disable()  # until they are imported: a fifth of that time would go into looking for garbage among the modules
    # As torchrun sets it for several ranks. A process that was forked would wait for ever for threads of its parent.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # of the engine, and of the actor's forward pass
# How far apart engine and actor may be: the mean |difference| of log-probs, in nats. Two programs never round alike;
# healthy runs had up to 0.02 in bfloat16 and 1e-6 in float32.
TOLERANCE = 0.05 if DEVICE == "cuda" else 1e-5
# SGLang's CPU mode needs stand-ins for sgl_kernel and torchvision, which PyPI has for CUDA only, and a plugin for MLA.
STAND_INS = os.environ.get("SGLANG_CPU_STAND_INS", Path(__file__).parents[1] / "harness/runtime/standins")

# For sglang.Engine; arguments that a release does not have are left out. With dummy weights, a tensor that a sync
# misses shows. Without a tokenizer, prompts and responses are token ids on both sides, so no text can be tokenized
# differently.
ENGINE_ARGUMENTS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "sampling_backend": "pytorch"}
# For an architecture that SGLang does not know it would import the Python files of the model's folder that auto_map
# names.
ENGINE_ARGUMENTS["json_model_override_args"] = '{"auto_map": {}}'
# Capturing CUDA graphs (under a name that depends on the release) and compiling a fusion would take minutes, for three
# steps.
GRAPHS = ("disable_cuda_graph", "disable_piecewise_cuda_graph", "disable_prefill_cuda_graph")
ENGINE_ARGUMENTS |= dict.fromkeys((*GRAPHS, "enforce_disable_flashinfer_allreduce_fusion"), True)
ON_GPU = {"device": "cuda", "attention_backend": "triton", "enable_memory_saver": True, "mem_fraction_static": 0.4}
ON_CPU = {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 4096, "mem_fraction_static": 0.1}
ENGINE_ARGUMENTS |= ON_GPU if DEVICE == "cuda" else ON_CPU
# Of every request, besides length and temperature: without an end of sequence all responses are equally long.
SAMPLING: dict[str, Any] = {"ignore_eos": True}
# Read when SGLang is imported. Without the last one, it would compile C++.
CPU_MODE = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NCCL_SO_PATH": "no-nccl-on-cpu", "TORCHDYNAMO_DISABLE": "1"}


def clean_environment(inherited: dict[str, str]) -> dict[str, str]:
    """Return an environment for the engine, without torchrun's variables.

    With them SGLang's processes would take themselves for ranks of this job, and wait for each other in torchrun's
    store.
    """
    prefixes, suffixes = ("TORCHELASTIC_", "MASTER_", "ROLE_", "OMP_NUM_"), ("RANK", "WORLD_SIZE")
    return {key: value for key, value in inherited.items() if not (key.startswith(prefixes) or key.endswith(suffixes))}


def engine_gpus(visible: list[str | None], ranks: list[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES of the engine of these ranks: its TP rank i runs on the GPU of rank ranks[i]."""
    # visible: by rank, a list for all of them, or the rank's own entry, or None. Entries: indices, UUIDs, MIG names.
    lists = [value.split(",") if value else [str(gpu) for gpu in range(len(visible))] for value in visible]
    gpus = [entries[rank % len(entries)].strip() for rank, entries in enumerate(lists)]
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"each rank must have a GPU of its own, got {gpus} from CUDA_VISIBLE_DEVICES {visible}")
    return ",".join(gpus[rank] for rank in ranks)


def engine_cores(ranks: list[int]) -> str:
    """Return SGLANG_CPU_OMP_THREADS_BIND of the engine of these ranks: a core for each of its TP ranks."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in ranks)


def engine_placement(store: dist.Store, rank: int, world: int, tp: int) -> dict[str, str]:
    """Return the variables that put the engine of this rank's TP group on the group's GPUs (or cores); collective."""
    first = rank - rank % tp
    ranks = list(range(first, first + tp))
    if DEVICE == "cuda":
        store.set(f"visible to {rank}", json.dumps(os.environ.get("CUDA_VISIBLE_DEVICES")))
        visible = [json.loads(store.get(f"visible to {each}")) for each in range(world)]
        # SGLang refuses to start on GPUs with unequal free memory. The trainer may well hold more of one than of
        # another.
        return {"CUDA_VISIBLE_DEVICES": engine_gpus(visible, ranks), "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    return {"SGLANG_CPU_OMP_THREADS_BIND": engine_cores(ranks), "OMP_NUM_THREADS": "1"}


@contextmanager
def engine_environment(placement: dict[str, str]) -> Iterator[None]:
    """Hide torchrun's variables from what starts within this, and set those of placement; restore all afterwards."""
    before = dict(os.environ)
    for name in before.keys() - clean_environment(before).keys():  # clear() would move what setproctitle looks for
        del os.environ[name]
    os.environ |= placement
    try:
        yield
    finally:
        os.environ.clear()  # SGLang sets NCCL_* for itself; in the trainer NCCL needs the same values on all ranks
        os.environ |= before


def free_ports(count: int) -> list[int]:
    """Return free ports of this host, all different because they are drawn at the same time."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def prepare(settings: Settings, store: dist.Store, rank: int, world: int, new: str) -> tuple[str, list[int]]:
    """Write the model on the first rank; return its folder, and two ports for each engine; collective."""
    if rank == 0:
        # Ranks of one host can share a folder, and only the first one writes: transformers lets no other rank save a
        # model.
        folder = settings.model
        if not os.path.isdir(folder):
            folder = write_model(new, settings.model, tiny_shape(settings.model), settings.seed)
        # One rank draws the ports of all engines. SGLang draws random ports, and a trainer seeds those generators
        # alike. All ranks need one authkey: on the CPU an engine fetches tensors from every rank's process, which asks
        # for its key.
        authkey = bytes(multiprocessing.current_process().authkey).hex()
        store.set("prepared", json.dumps([folder, free_ports(2 * world // settings.tp), authkey]))
    folder, ports, authkey = json.loads(store.get("prepared"))
    multiprocessing.current_process().authkey = bytes.fromhex(authkey)
    return folder, ports


def start_engine(settings: Settings, placement: dict[str, str], ports: list[int], dp: int, folder: str) -> Any:
    """Start the sglang.Engine of TP group dp. ports: two for each engine."""
    try:
        with engine_environment(placement):
            import sglang
            from sglang.srt.server_args import ServerArgs

            known = signature(ServerArgs).parameters
            arguments = {key: value for key, value in ENGINE_ARGUMENTS.items() if key in known}
            arguments |= {"port": ports[2 * dp], "dist_init_addr": f"127.0.0.1:{ports[2 * dp + 1]}"}
            arguments |= {"tp_size": settings.tp, "dtype": str(DTYPE).split(".")[1], "random_seed": settings.seed + dp}
            if DEVICE == "cuda":
                gc.enable()
                return sglang.Engine(model_path=folder, **arguments)
            # An engine has a process for each TP rank and one more. SGLang starts them by "spawn", so that each imports
            # torch and SGLang anew, because CUDA cannot be forked. On the CPU it can: then they have what this process
            # has imported.
            logging.getLogger("sglang").setLevel("ERROR")  # some models cannot be imported without a GPU
            import sglang.srt.models.registry

            gc.freeze()  # what is imported stays, and is shared as long as the collector does not touch it
            gc.enable()
            multiprocessing.set_start_method("fork", force=True)
            with patch.object(multiprocessing, "set_start_method"):  # SGLang's call does nothing
                return sglang.Engine(model_path=folder, **arguments)
    finally:
        remove_shared_memory()


def remove_shared_memory() -> None:
    """Remove the names of the engine's files in /dev/shm (25 MB). They end with the processes that have them open.

    SGLang ends its processes by SIGKILL, and they could not remove anything.
    """
    maps = [Path(f"/proc/{child.pid}/maps").read_text() for child in multiprocessing.active_children()]
    for file in {line.split()[5] for each in maps for line in each.splitlines() if " /dev/shm/sgl" in line}:
        Path(file).unlink(missing_ok=True)


def call(engine: Any, mesh: DeviceMesh, method: str, **arguments: Any) -> Any:
    """Call the engine on the first rank of the TP group; return its answer, or raise its refusal, on all of them."""
    # begin_weight_update and end_weight_update came with 0.5.21.
    found = getattr(engine, method, None) if mesh.get_local_rank("tp") == 0 else None
    # By SIGQUIT a scheduler that fails has this process killed. The first call sets a handler that hears it only while
    # a call runs, because uvloop waits for the next signal with those that arrive in between.
    heard_at_any_time = signal.getsignal(signal.SIGQUIT)
    told = found(**arguments) if found else None
    signal.signal(signal.SIGQUIT, heard_at_any_time)
    # Of an object of SGLang's only this: others need not import SGLang to read it.
    answer = [getattr(told, "success", told)]
    dist.broadcast_object_list(answer, group=mesh.get_group("tp"), group_src=0)
    if isinstance(answer[0], tuple) and not answer[0][0]:  # (False, message): SGLang does not raise
        raise RuntimeError(f"{method}: the engine refused: {answer[0][1]}")
    return answer[0]


def memory(engine: Any, mesh: DeviceMesh, action: str, *tags: str) -> None:
    """Release the GPU memory of "weights" or "kv_cache", whose contents are lost, or resume it; collective."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # torch keeps memory that the trainer has freed; the engine needs it
        dist.barrier()
        # After its last answer an engine still computes one more batch, and a release would end it. Until then it
        # refuses to flush.
        while action == "release" and not call(engine, mesh, "flush_cache"):
            time.sleep(0.01)
        call(engine, mesh, f"{action}_memory_occupation", tags=list(tags))


def tiny_shape(name: str) -> dict[str, Any]:
    """Return the fields of a tiny model's config. name: one of MODELS."""
    shape: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 8, "max_position_embeddings": 2048, "initializer_range": 0.04}
    shape |= {"num_key_value_heads": 4 if name == "qwen2" else 8, "tie_word_embeddings": name == "qwen2"}
    if name == "deepseek_v3":
        shape |= {"q_lora_rank": 256, "first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_routed_experts": 16}
        shape |= {"num_experts_per_tok": 4, "n_group": 2, "topk_group": 1}
        shape |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # which SGLang looks for
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
        shape["rope_parameters"] = rope | {"mscale": 1.0, "mscale_all_dim": 1.0}  # SGLang's CPU mode has this one
    return shape


def write_model(folder: str, name: str, shape: dict[str, Any], seed: int) -> str:
    """Write a random float32 checkpoint whose norms, biases and buffers are not 1 or 0, so that they matter."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **shape))
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor) * 0.1 * (tensor.ndim == 1))
    model.save_pretrained(folder)
    return folder


def build_actor(folder: str, **options: Any) -> nn.Module:
    """Load the actor and shard it by FSDP2 over all ranks; collective. options: how transformers loads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    # A layer is gathered in DTYPE. Inputs are not cast: what the model keeps in float32 between layers stays so.
    policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*model.base_model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model.to(DEVICE)


def checkpoint_tensors(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield full tensors by name, a decoder layer at a time, and what is outside of the layers; collective."""
    # SGLang's loaders know the names and shapes that save_pretrained writes (tied tensors once, buffers too, experts
    # one by one) and ignore all others. A layer must not be split over two calls: SGLang fuses some tensors as they
    # arrive, such as q_a_proj with kv_a_proj_with_mqa, and forgets the first half when the call ends.
    loading = sys.modules.get("transformers.core_model_loading")  # transformers 5 fuses experts in memory; undone below
    saved, layers = model.state_dict(), dict[str, dict[str, Tensor]]()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved:
            layers.setdefault(".".join(name.split(".")[:3]), {})[name] = tensor
    for layer in layers.values():
        # Cast shards before gathering them, which moves half the bytes. Buffers keep their dtype: the correction bias
        # of a router is float32, and in bfloat16 it would choose other experts.
        sent = {name: each.detach().to(DTYPE) if each.requires_grad else each for name, each in layer.items()}
        full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in sent.items()}
        full = loading.revert_weight_conversion(model, full) if loading else full
        yield {name: each.contiguous() for name, each in full.items()}


def sync_weights(engine: Any, mesh: DeviceMesh, checkpoint: Iterable[dict[str, Tensor]]) -> None:
    """Load these tensors into every engine, one call for each item of checkpoint_tensors; collective."""
    call(engine, mesh, "begin_weight_update")
    for tensors in checkpoint:
        send_tensors(engine, mesh, tensors)
    call(engine, mesh, "end_weight_update")


def send_tensors(engine: Any, mesh: DeviceMesh, tensors: dict[str, Tensor]) -> None:
    """Load full tensors into every engine by one call; collective."""
    # Only a handle travels (CUDA IPC). The engine's TP rank on this GPU opens this rank's copy, which must live until
    # then.
    own = {name: bytes(ForkingPickler.dumps(tensor)) for name, tensor in tensors.items()}
    ranks: list[Any] = [None] * mesh.size(1)
    dist.all_gather_object(ranks, own, group=mesh.get_group("tp"))
    named = []
    if engine:
        from sglang.srt.weight_sync.utils import LocalSerializedTensor

        named = [(name, LocalSerializedTensor(values=[each[name] for each in ranks])) for name in own]
    call(engine, mesh, "update_weights_from_tensor", named_tensors=named, load_format=None, flush_cache=True)


def rollout(engine: Any, mesh: DeviceMesh, settings: Settings, step: int, vocab_size: int) -> dict[str, Tensor]:
    """Sample responses to random prompts; return all of them on each rank of the TP group; collective."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step * 1009 + mesh.get_local_rank("dp"))
    prompts = torch.randint(vocab_size, (settings.prompts, settings.prompt_tokens), generator=generator)
    prompts = prompts.repeat_interleave(settings.responses, dim=0)
    sampling = SAMPLING | {"max_new_tokens": settings.response_tokens, "temperature": settings.temperature}
    answers = call(engine, mesh, "generate", input_ids=prompts.tolist(), sampling_params=sampling, return_logprob=True)
    sampled = [answer["meta_info"]["output_token_logprobs"] for answer in answers]  # of (log-prob, token, text)
    tokens = torch.tensor([[token for _, token, *_ in response] for response in sampled])
    log_probs = torch.tensor([[log_prob for log_prob, *_ in response] for response in sampled])
    # int64 [B, P + T] and float32 [B, T]; B is prompts * responses.
    return {"ids": torch.cat([prompts, tokens], dim=1), "engine_log_probs": log_probs}


def own_share(batch: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return every tp-th row, so that each rank of a TP group trains on other responses to each prompt."""
    return {name: each[mesh.get_local_rank("tp") :: mesh.size(1)].to(DEVICE) for name, each in batch.items()}


def scored(batch: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Add rewards and advantages, float32 [B], to a TP group's whole batch."""
    tokens = batch["ids"][:, settings.prompt_tokens :]
    rewards = (tokens % 2 == 0).float().mean(-1)  # the share of even token ids: useless, but easy to learn
    return batch | {"rewards": rewards, "advantages": grpo_advantages(rewards.view(-1, settings.responses)).flatten()}


def grpo_advantages(rewards: Tensor) -> Tensor:
    """Compare each reward with the others of its prompt: float32 [prompts, responses], and so is the answer."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)


def response_log_probs(model: nn.Module, ids: Tensor, settings: Settings) -> Tensor:
    """Return the actor's log-probs of the response tokens, teacher-forced: int64 [B, P + T] -> float32 [B, T]."""
    logits = model(input_ids=ids, use_cache=False).logits[:, settings.prompt_tokens - 1 : -1].float()
    log_probs = (logits / settings.temperature).log_softmax(-1)
    return log_probs.gather(-1, ids[:, settings.prompt_tokens :, None]).squeeze(-1)


def clipped_surrogate(log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return PPO's loss of each token: log-probs [B, T], new and old, and advantages [B] -> [B, T]."""
    ratio = (log_probs - old).exp()
    return -torch.minimum(advantages[:, None] * ratio, advantages[:, None] * ratio.clamp(1 - clip, 1 + clip))


def mean_over_ranks(values: Tensor) -> float:
    """Return the mean of the values of all ranks, in float64; collective."""
    total = torch.stack([values.detach().double().sum(), torch.tensor(values.numel(), device=DEVICE)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def log_prob_difference(model: nn.Module, batch: dict[str, Tensor], settings: Settings) -> float:
    """Return the mean |engine's log-prob - actor's| over the response tokens of all ranks, in nats; collective."""
    gap = batch["engine_log_probs"] - response_log_probs(model, batch["ids"], settings)
    return mean_over_ranks(gap.abs().nan_to_num(nan=torch.inf))  # comparisons with NaN are false: it would pass


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], settings: Settings) -> str:
    """Update the actor on a rollout; return the last loss and gradient norm, for the console; collective."""
    old = None
    for _ in range(settings.epochs):
        log_probs = response_log_probs(model, batch["ids"], settings)
        old = log_probs.detach() if old is None else old
        loss = clipped_surrogate(log_probs, old, batch["advantages"], settings.clip).mean()
        loss.backward()  # FSDP averages gradients over ranks; with equally many tokens each, that is the mean over all tokens
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)  # a DTensor
        optimizer.step()
        optimizer.zero_grad()
    return f"loss {mean_over_ranks(loss):+.4f}  grad norm {norm.full_tensor():.3f}"


def train(settings: Settings, mesh: DeviceMesh, engine: Any, folder: str) -> bool:
    """Run all steps; return whether every check passed; collective, with one answer for all ranks."""
    vocab_size = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).vocab_size
    batch = own_share(rollout(engine, mesh, settings, -1, vocab_size), mesh)
    memory(engine, mesh, "release", "kv_cache", "weights")
    model = build_actor(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    # The control: the engine has dummy weights now, so the check must fail, or it could not tell anything later.
    stale = log_prob_difference(model, batch, settings)
    good = "good" if stale > TOLERANCE else f"but it does not: at most {TOLERANCE:g} counts as equal"
    say(
        f"before the first sync the engine has dummy weights, so it must differ (log-prob difference {stale:.1e}): {good}"
    )
    steps, proven, worst, passed = 0, 0, 0.0, stale > TOLERANCE
    held = settings.responses // settings.tp  # rows of the last prompt, which is held out of the training
    while passed and steps < settings.steps:
        memory(engine, mesh, "resume", "weights")
        if steps != settings.skip_sync:
            sync_weights(engine, mesh, checkpoint_tensors(model))
        memory(engine, mesh, "resume", "kv_cache")
        batch = own_share(scored(rollout(engine, mesh, settings, steps, vocab_size), settings), mesh)
        memory(engine, mesh, "release", "kv_cache", "weights")
        difference = log_prob_difference(model, batch, settings)
        passed, worst = difference <= TOLERANCE, max(worst, difference)
        proven += passed and stale > TOLERANCE  # a sync that did nothing would have left a difference of about `stale`
        trained = {name: each[:-held] for name, each in batch.items()}
        shown = f"reward {mean_over_ranks(batch['rewards']):.3f}  {train_step(model, optimizer, trained, settings)}"
        # How far would the next rollout differ without a sync? Measured on the prompt that was held out: the next step
        # has new prompts, and an update moves the log-probs of the responses it was trained on several times as far.
        stale = log_prob_difference(model, {name: each[-held:] for name, each in batch.items()}, settings)
        say(f"step {steps}: log-prob difference {difference:.1e}  {shown}  after the update {stale:.1e}")
        steps += 1
    verdict = f"{'PASSED' if passed else 'FAILED'}: {steps} of {settings.steps} steps, {proven} syncs proven"
    say(f"{verdict}; worst log-prob difference {worst:.1e} nats, tolerance {TOLERANCE:g}")
    return passed


def end_when_told(*folders: str) -> None:
    """Wait for Ctrl-C or SIGTERM, and end this rank then, its engine and these folders.

    On a thread: while the main one waits for other ranks, it does not hear of signals.
    """
    number = signal.sigwait(ENDING)
    for child in multiprocessing.active_children():
        child.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"interrupted by {signal.Signals(number).name}")
    os._exit(128 + number)


def main(settings: Settings) -> int:
    """Build everything, run, and end everything; return the exit code."""
    if DEVICE == "cuda":
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # IPC handles name GPUs by UUID: trainer and engine number them differently
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:  # for this process and those that SGLang starts
        sys.path.insert(0, str(STAND_INS))
        os.environ["PYTHONPATH"] = f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        os.environ |= CPU_MODE
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world % settings.tp or settings.responses % settings.tp or world != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit(
            f"tp must divide {world} ranks of one host and {settings.responses} responses, got {settings.tp}"
        )
    # The engines start before torch.distributed, because processes that are forked later would take themselves for
    # ranks. What the ranks have to tell each other before goes through torchrun's store.
    store, *_ = next(dist.rendezvous("env://"))
    engine = None
    with tempfile.TemporaryDirectory() as new:
        own = get_temp_dir()  # multiprocessing's, which removes it when Python ends
        os.environ["TMPDIR"] = tempfile.tempdir = new  # SGLang makes some there, and removes none
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # for the engine's processes too, which end with this one
        threading.Thread(target=end_when_told, args=[new, own], daemon=True).start()
        folder, ports = prepare(settings, store, rank, world, new)
        placement = engine_placement(store, rank, world, settings.tp)
        try:
            say(f"starting {world // settings.tp} sglang.Engine on {settings.tp} ranks each, on {DEVICE}")
            if rank % settings.tp == 0:
                engine = start_engine(settings, placement, ports, rank // settings.tp, folder)
            gc.enable()  # on the other ranks, which import nothing more
            backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world)
            mesh = init_device_mesh("cpu", (world // settings.tp, settings.tp), mesh_dim_names=("dp", "tp"))
            passed = train(settings, mesh, engine, folder)
        finally:
            if engine:
                engine.shutdown()
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(SETTINGS))
