"""in_flight_on_two_ranks.py FOLDER: run by torchrun; updates of a real engine of tp 2 in SGLang's CPU mode, made while
it answers.

Rank 0 writes what each rank saw as JSON.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

PROMPT = list(range(5, 45))
SUFFIX = [50, 51, 52, 53]
LONG = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}
NEXT = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}

Weights = list[tuple[str, torch.Tensor]]


def main(folder: Path) -> None:
    from safetensors.torch import load_file

    from harness.rollout.verl_engine import VerlEngine
    from harness.task.tiny_models import save_tiny_model

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for seed in (0, 1):
            save_tiny_model("qwen3", folder / f"model{seed}", seed, texts=["hello, the quick brown fox"])
    dist.barrier()
    weights = [list(load_file(folder / f"model{seed}" / "model.safetensors").items()) for seed in (0, 1)]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    engine = VerlEngine(
        *(mesh, 1), log_dir=folder / "engine", model_path=str(folder / "model0"), dtype="float32", random_seed=0,
       
    )  # fmt: skip
    seen: dict[str, Any] = {"at rest": at_rest(engine, weights)}
    for mode in ("in_place", "retract"):
        seen[mode] = in_flight(engine, weights, mode)
    unknown: Any = "later"
    seen["no begin"] = failure(engine.end_generate)
    seen["unknown mode"] = failure(lambda: engine.pause_generation(unknown))
    engine.shutdown()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen)
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def at_rest(engine: Any, weights: list[Weights]) -> dict[str, Any]:
    """Return what an idle engine answers before and after an update with a version, and a check of its prefixes."""
    from dataclasses import asdict

    from harness.rollout.responses import read_responses
    from harness.rollout.stale_prefixes import check_prefix

    def answer() -> Any:
        answers = engine.generate(input_ids=[PROMPT], sampling_params=NEXT, return_logprob=True)
        [response] = read_responses(answers)
        return response.token_ids, response.weight_versions

    before = answer()
    engine.update_weights_from_tensor(weights[1])
    engine.set_weight_version("7")
    after = answer()
    return {"before": before, "after": after, "prefix": asdict(check_prefix(engine, PROMPT + SUFFIX, len(PROMPT)))}


def in_flight(engine: Any, weights: list[Weights], mode: Any) -> dict[str, Any]:
    """Return what becomes of an update from model 0 to model 1 while the engine answers."""
    from dataclasses import asdict

    from harness.rollout.stale_prefixes import check_prefix

    engine.update_weights_from_tensor(weights[0])
    engine.set_weight_version("0")
    alone = engine.generate(input_ids=[PROMPT], sampling_params=LONG, return_logprob=True)[0]["output_ids"]
    engine.flush_cache()
    engine.begin_generate(input_ids=[PROMPT], sampling_params=LONG, return_logprob=True)
    engine.pause_generation(mode)
    engine.update_weights_from_tensor(weights[1], flush_cache=mode == "retract")
    engine.set_weight_version("1")
    engine.continue_generation()
    [answer] = engine.end_generate()
    prefix = asdict(check_prefix(engine, PROMPT + SUFFIX, len(PROMPT)))
    tokens = [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]]
    return {
        "alone": alone,
        "tokens": tokens,
        "versions": answer["meta_info"].get("weight_versions"),
        "version": answer["meta_info"].get("weight_version"),
        "prefix": prefix,
        "prefix after the flush": asdict(check_prefix(engine, PROMPT + SUFFIX, len(PROMPT))),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
