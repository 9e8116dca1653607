"""Run by torchrun: VerlEngine used as a library, without the rest of the harness. Rank 0 writes what it saw as JSON."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def failure(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path) -> None:
    from harness.rollout.verl_engine import VerlEngine
    from harness.runtime.cpu_standins import activate
    from harness.task.tiny_models import save_tiny_model

    activate()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        for seed in (0, 1):
            save_tiny_model("qwen3", folder / f"model{seed}", seed, texts=["hello, the quick brown fox"])
    dist.barrier()
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    model_path = str(folder / "model0")
    seen: dict[str, Any] = {
        "unknown": failure(lambda: VerlEngine(mesh["tp"], 1, model_path=model_path, mem_fraction=0.1)),
        "nnodes": failure(lambda: VerlEngine(mesh["tp"], 2, model_path=model_path)),
    }
    engine = VerlEngine(mesh["tp"], 1, log_dir=folder / "engine", model_path=model_path, dtype="float32", random_seed=0)

    def tokens() -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]

    seen["before"] = tokens()
    seen["text"] = engine.generate("hello", GREEDY)["text"]
    seen["async"] = [
        answer["output_ids"] for answer in asyncio.run(engine.async_generate(input_ids=PROMPTS, sampling_params=GREEDY))
    ]
    from safetensors.torch import load_file

    weights = {seed: list(load_file(folder / f"model{seed}" / "model.safetensors").items()) for seed in (0, 1)}
    engine.release_memory_occupation(["kv_cache", "weights"])
    engine.resume_memory_occupation(["weights"])
    engine.resume_memory_occupation(["kv_cache"])
    engine.update_weights_from_tensor(weights[1], load_format="flattened_bucket")
    seen["bucket"] = tokens()
    engine.update_weights_from_tensor(weights[0])
    seen["tensor"] = tokens()
    engine.update_weights_from_disk(str(folder / "model1"))
    seen["disk"] = tokens()
    engine.flush_cache()
    seen["unknown_tag"] = failure(lambda: engine.release_memory_occupation(["wieghts"]))
    seen["no_folder"] = failure(lambda: engine.update_weights_from_disk(str(folder / "absent")))
    seen["still_serving"] = tokens()
    engine.shutdown()
    engine.shutdown()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen)
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    from harness.cluster.world import hard_exit

    hard_exit(0)
