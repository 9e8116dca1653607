"""engine_on_cpu.py FOLDER: run by test_sglang_api_real.py, in a process of its own since a dying scheduler kills it.

FOLDER holds model-0 and model-1, two random models of one shape. Prints one JSON object: what a real engine in
SGLang's CPU mode answered.
"""

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

LOADER = "what_is_held.load"
LOADER_SOURCE = """
import hashlib, json, pathlib, torch

def load(model, named_tensors):
    ((name, _),) = named_tensors
    held = {n: p.detach().reshape(-1).view(torch.uint8).numpy() for n, p in model.named_parameters()}
    held = {n: hashlib.sha256(p).hexdigest() for n, p in held.items()}
    pathlib.Path(__file__).with_name(name).write_text(json.dumps(held))
"""
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True}


def main(folder: Path) -> None:
    from harness.rollout import sglang_api
    from harness.rollout.cpu_mode import cpu_environment
    from harness.rollout.defaults import engine_defaults
    from harness.runtime.cpu_standins import activate

    activate()
    os.environ.update(cpu_environment(1))
    sys.path.append(str(folder))  # a spawned scheduler takes over sys.path, and finds LOADER there
    (folder / "what_is_held.py").write_text(LOADER_SOURCE)
    api = sglang_api.probe()
    user = {
        "model_path": str(folder / "model-0"),
        "dtype": "float32",
        "random_seed": 3,
        "custom_weight_loader": [LOADER],
    }
    args, dropped = sglang_api.check_arguments(api, user, engine_defaults("cpu"))
    foretold = sglang_api.common_environment(api, args, os.environ)
    engine = sglang_api.build_engine(args)
    try:
        found = facts(api, engine, folder)
    finally:
        engine.shutdown()
    found["dropped"] = dropped
    found["foretold"] = foretold
    found["environment"] = {name: os.environ.get(name) for name in foretold}
    print(json.dumps(found), flush=True)


def facts(api: Any, engine: Any, folder: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from harness.rollout import sglang_api as front

    found: dict[str, Any] = {"arguments_as_read": sorted(api.engine_arguments), "arguments": server_arguments()}
    names = ("update_weights_from_tensor", "update_weights_from_distributed")
    found["parameters"] = {name: list(inspect.signature(getattr(engine, name)).parameters) for name in names}
    weights = [load_file(folder / f"model-{i}" / "model.safetensors") for i in range(2)]

    def sample() -> list[list[int]]:
        return [answer["output_ids"] for answer in front.generate(engine, input_ids=PROMPTS, sampling_params=SAMPLING)]

    def update(state: dict[str, Any], load_format: str | None = None) -> None:
        tensors: list[Any] = list(state.items())
        if load_format == "flattened_bucket":
            tensors = [front.serialize(front.flattened_bucket(api, tensors))]
        with front.update_session(api, engine):
            front.update_weights_from_tensor(api, engine, tensors, load_format=load_format, flush_cache=True)

    def held(label: str) -> None:
        """Keep what the scheduler holds: a custom loader that loads nothing writes its hashes to the file `label`."""
        update({label: torch.zeros(1)}, LOADER)
        found[label] = json.loads((folder / label).read_text())

    front.flush_cache(api, engine)  # as the first call: until 0.5.9 it would wait for ever
    found["output_ids"] = sample()
    held("at start")
    update(weights[1])
    held("after tensors of another model")
    update(weights[0], "flattened_bucket")
    held("after bucket")
    front.check_weights(api, engine, "reset_tensors")
    held("after reset")
    update(weights[0])
    held("after reset and tensors")
    front.check_weights(api, engine, "reset_tensors")
    front.update_weights_from_disk(engine, str(folder / "model-0"))
    held("after reset and disk")
    front.check_weights(api, engine, "snapshot")
    found["compare"] = refusal(lambda: front.check_weights(api, engine, "compare"))
    found["checksum"] = refusal(lambda: front.check_weights(api, engine, "checksum"))
    for tags in (["kv_cache"], ["weights"]):
        front.release_memory_occupation(api, engine, tags)
    for tags in (["weights"], ["kv_cache"]):
        front.resume_memory_occupation(api, engine, tags)
    found["no_such_folder"] = refusal(lambda: front.update_weights_from_disk(engine, str(folder / "absent")))
    return found


def refusal(call: Any) -> str | None:
    """The message of the EngineRefused that `call` raises, or None."""
    from harness.rollout.sglang_api import EngineRefused

    try:
        call()
    except EngineRefused as error:
        return str(error)
    return None


def server_arguments() -> list[str]:
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in dataclasses.fields(ServerArgs)]
    return sorted(name for name in fields if not name.startswith("_"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
