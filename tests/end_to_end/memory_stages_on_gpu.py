"""Run by torchrun on two GPUs: the memory stages of a real engine, in every order, and with a saver that is off.

Rank 0 writes what each rank saw as JSON. Arguments: folder.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
STAGED_TAGS = ("weights", "kv_cache")


def failure(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def orders() -> list[list[tuple[str, tuple[str, ...]]]]:
    """Every way to put both tags to sleep and wake them, one by one or in one call."""
    ways = [[(tag,) for tag in order] for order in itertools.permutations(STAGED_TAGS)] + [[STAGED_TAGS]]
    return [
        [("release", tags) for tags in down] + [("resume", tags) for tags in up]
        for down, up in itertools.product(ways, ways)
    ]


def main(folder: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh

    from harness.rollout import sglang_api
    from harness.rollout.memory_stages import MemoryStages, gpu_free_bytes
    from harness.rollout.verl_engine import VerlEngine
    from harness.task.tiny_models import save_tiny_model

    api = sglang_api.probe()
    os.environ.update(sglang_api.common_environment(api, {}, os.environ))
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    if dist.get_rank() == 0:
        save_tiny_model("qwen2", folder / "model", 0, "bfloat16", "cuda", texts=["hello"])
    dist.barrier()
    weights = [(name, tensor.cuda()) for name, tensor in load_file(folder / "model" / "model.safetensors").items()]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    arguments = {"model_path": str(folder / "model"), "dtype": "bfloat16", "random_seed": 0}

    class ClaimsToHaveASaver(VerlEngine):
        @property
        def has_memory_saver(self) -> bool:
            return True

    def engine_with(saver: bool, kind: type[VerlEngine] = VerlEngine) -> VerlEngine:
        log = folder / f"saver-{saver}"
        log.mkdir(exist_ok=True)
        return kind(mesh, 1, log_dir=log, mem_fraction_static=0.3, enable_memory_saver=saver, **arguments)

    engine = engine_with(True)
    facts: list[Any] = []
    stages = MemoryStages(engine, gpu_free_bytes(gpu), fact=lambda name, **values: facts.append(values))

    def tokens() -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]

    seen: dict[str, Any] = {"before": tokens(), "after": []}
    for order in orders():
        for action, tags in order:
            (stages.release if action == "release" else stages.resume)(*tags)
        engine.update_weights_from_tensor(weights)
        seen["after"].append(tokens())
    seen["facts"] = list(facts)
    stages.release("kv_cache")
    seen["refused"] = [
        failure(lambda: stages.release("kv_cache")),
        failure(lambda: stages.resume("weights")),
        failure(lambda: stages.resume("kv_cache", "weights")),
    ]
    stages.resume("kv_cache")
    seen["still_serving"] = tokens()
    engine.shutdown()
    engine = engine_with(False, ClaimsToHaveASaver)
    stages = MemoryStages(engine, gpu_free_bytes(gpu), patience_seconds=2)
    seen["saver_off"] = failure(lambda: stages.release("kv_cache"))
    engine.shutdown()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen)
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
