"""http_on_two_ranks.py FOLDER: run by torchrun.

One server of tp 2, updated in every way; rank 0 writes what was seen.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


def main(folder: Path) -> None:
    from safetensors.torch import load_file

    from harness.task.tiny_models import save_tiny_model
    from tests.rollout.http_engine import HttpEngine

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for seed in (0, 1):
            save_tiny_model("qwen3", folder / f"model{seed}", seed, texts=["hello, the quick brown fox"])
    dist.barrier()
    weights = [list(load_file(folder / f"model{seed}" / "model.safetensors").items()) for seed in (0, 1)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    engine = HttpEngine(
        mesh, log_dir=folder, model_path=str(folder / "model0"), dtype="float32", skip_tokenizer_init=True
    )
    seen: dict[str, Any] = {}

    def note(name: str) -> None:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
        seen[name] = [entry[:2] for answer in answers for entry in answer["meta_info"]["output_token_logprobs"]]

    try:
        note("model0")
        engine.update_weights_from_tensor(weights[1], "flattened_bucket")
        note("model1 by bucket")
        engine.update_weights_from_disk(str(folder / "model0"))
        note("model0 by disk")
        engine.update_weights_from_tensor(weights[1])
        note("model1 by tensor")
        engine.update_weights_from_distributed(weights[0])
        note("model0 by distributed")
        try:
            engine.update_weights_from_disk(str(folder / "absent"))
        except Exception as error:
            seen["refused"] = f"{type(error).__name__}: {error}"
    finally:
        engine.shutdown()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    from harness.runtime.processes import hard_exit

    hard_exit(0)
