"""engine_on_two_ranks.py FOLDER: run by torchrun; one real engine of tp 2 in SGLang's CPU mode, for all tests here.

Rank 0 writes what each rank saw as JSON.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

LOADER = "what_is_held.load"
LOADER_SOURCE = """
import hashlib, json, os, pathlib, torch

def load(model, named_tensors):
    ((name, _),) = named_tensors
    held = {n: p.detach().reshape(-1).view(torch.uint8).numpy() for n, p in model.named_parameters()}
    held = {n: hashlib.sha256(p).hexdigest() for n, p in held.items()}
    held["environment"] = dict(os.environ)
    unfinished = pathlib.Path(__file__).with_name(f"{name} {torch.distributed.get_rank()}.unfinished")
    unfinished.write_text(json.dumps(held))
    unfinished.rename(unfinished.with_suffix(""))
"""
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]

Weights = list[list[tuple[str, torch.Tensor]]]


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    from safetensors.torch import load_file

    from harness.rollout import sglang_api
    from harness.rollout.verl_engine import VerlEngine
    from harness.task.tiny_models import save_tiny_model

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        (folder / "what_is_held.py").write_text(LOADER_SOURCE)
        for seed in (0, 1):
            save_tiny_model("qwen3", folder / f"model{seed}", seed, texts=["hello, the quick brown fox"])
    dist.barrier()
    sys.path.append(str(folder))  # a spawned scheduler takes over sys.path, and finds LOADER there
    weights = [list(load_file(folder / f"model{seed}" / "model.safetensors").items()) for seed in (0, 1)]
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "tp", "pp"))["tp"]
    model = str(folder / "model0")
    foretold = sglang_api.common_environment(sglang_api.probe(), {}, os.environ)
    seen: dict[str, Any] = {
        "foretold": foretold,
        "unknown": failure(lambda: VerlEngine(mesh, 1, model_path=model, mem_fraction=0.1)),
        "nnodes": failure(lambda: VerlEngine(mesh, 2, model_path=model)),
    }
    engine = VerlEngine(
        *(mesh, 1), log_dir=folder / "engine", model_path=model, dtype="float32", random_seed=0,
        custom_weight_loader=[LOADER],
    )  # fmt: skip
    seen["forked"] = engine.starts.forked
    seen["arguments"] = engine.call_engine(argument_names)
    seen |= as_verl_engine(engine, folder, weights)
    engine.shutdown()
    engine.shutdown()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen)
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


def argument_names(inner: Any) -> list[str]:
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__struct_fields__", None) or [field.name for field in dataclasses.fields(ServerArgs)]
    return sorted(name for name in fields if not name.startswith("_"))


def held(engine: Any, folder: Path, label: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return a scheduler's environment, and the hash of each tensor of both: a custom loader that loads nothing writes
    them to files."""
    engine.update_weights_from_tensor([(label, torch.zeros(1))], load_format=LOADER)
    files = [folder / f"{label} {rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    of_ranks = [json.loads(file.read_text()) for file in files]
    environment, _ = (each.pop("environment") for each in of_ranks)
    return environment, {f"{name} on {rank}": digest for rank in range(2) for name, digest in of_ranks[rank].items()}


def as_verl_engine(engine: Any, folder: Path, weights: Weights) -> dict[str, Any]:
    """Return what this rank sees of the engine, which holds the weights of model0."""

    def tokens() -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]

    seen: dict[str, Any] = {"before": tokens(), "text": engine.generate("hello", GREEDY)["text"]}
    seen |= stops(engine, folder)
    seen["environment"], seen["held at start"] = held(engine, folder, "at start")
    engine.release_memory_occupation(["kv_cache", "weights"])
    engine.resume_memory_occupation(["weights"])
    engine.resume_memory_occupation(["kv_cache"])
    engine.update_weights_from_tensor(weights[1], load_format="flattened_bucket")
    seen["bucket"], seen["held after bucket"] = tokens(), held(engine, folder, "after bucket")[1]
    engine.update_weights_from_tensor(weights[0])
    seen["tensor"], seen["held after tensors"] = tokens(), held(engine, folder, "after tensors")[1]
    engine.update_weights_from_disk(str(folder / "model1"))
    seen["disk"], seen["held after disk"] = tokens(), held(engine, folder, "after disk")[1]
    engine.flush_cache()
    seen["no_folder"] = failure(lambda: engine.update_weights_from_disk(str(folder / "absent")))
    seen["still_serving"] = tokens()
    return seen


def stops(engine: Any, folder: Path) -> dict[str, Any]:
    """Return what ends a greedy response to one prompt: the length, the third token's id, and its text."""
    from transformers import AutoTokenizer

    from harness.rollout.responses import read_responses

    decode = AutoTokenizer.from_pretrained(str(folder / "model0")).decode

    def response(**ends: Any) -> tuple[list[int], list[float], bool]:
        sampling = {"temperature": 0.0, "max_new_tokens": 6, **ends}
        answers = engine.generate(input_ids=PROMPTS[:1], sampling_params=sampling, return_logprob=True)
        found = read_responses(answers)[0]
        return found.token_ids, found.log_probs, found.truncated

    whole = response()
    third = whole[0][2]
    return {
        "whole": whole,
        "stop_token_ids": response(stop_token_ids=[third]),
        "stop": response(stop=[decode([third])]),
        "third at": whole[0].index(third),
        "text at": next(n for n in range(6) if decode([third]) in decode(whole[0][: n + 1])),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    from harness.runtime.processes import hard_exit

    hard_exit(0)
