"""transports_on_two_ranks.py FOLDER DP TP TRANSPORT...: run by torchrun, two ranks, real engines in CPU mode.

One start of the engines, in bfloat16; through each transport in turn come float32 weights that differ in every tensor
from those before, and what the engines then hold is read back. Each rank writes what it saw as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.weights.fp8_on_two_ranks import change_every_tensor, gaps

BUCKET_BYTES = 100_000  # several buckets, even of a tiny model


def main(folder: Path, dp: int, tp: int, transports: list[Any]) -> None:

    from harness.rollout.verl_engine import VerlEngine
    from harness.task.tiny_models import save_tiny_model
    from harness.tools.sync.read_back import read_back
    from harness.trainer.model import load_causal_lm
    from harness.weights.sent_model import SentModel
    from harness.weights.sync import WeightSync

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        save_tiny_model("qwen2", folder / "model", 0, "bfloat16", texts=["hello, the quick brown fox"])
    dist.barrier()
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    engine = VerlEngine(
        mesh["tp"],
        log_dir=folder / "engine",
        model_path=str(folder / "model"),
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        random_seed=rank,
    )
    model: Any = load_causal_lm(
        str(folder / "model"),
        torch.float32,
        torch.device("cpu"),
        init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        compute_dtype=torch.bfloat16,
    )
    seen: dict[str, Any] = {"dummy": difference(engine, model), "buckets": 0}
    for index, name in enumerate(transports):
        change_every_tensor(model, index, by=0.05)
        sent = SentModel.plain(model, torch.bfloat16)
        sync = WeightSync(engine, sent, transport=name, folder=folder / "run", check=False)
        sync.weights.bucket_bytes = BUCKET_BYTES
        seen["buckets"] = len(sync.weights.buckets)
        seen[f"{name} stale"] = difference(engine, model)
        sync.update_engine()
        seen[name] = difference(engine, model)
        change_every_tensor(model, 100 + index, by=0.05)
        sync.update_engine()
        seen[f"{name} again"] = difference(engine, model)
        seen[f"{name} wrong"] = read_back(sync.weights, sync.loader).differences
        if name == "distributed":
            seen |= broken_broadcasts(engine, sync)
            sync.update_engine()
            seen["distributed after failures"] = difference(engine, model)
        sync.close()
        sync.close()
        change_every_tensor(model, 200 + index, by=0.05)
        sync.update_engine()
        seen[f"{name} reopened"] = difference(engine, model)
        sync.close()
    seen["left on disk"] = [str(path) for path in (folder / "run").rglob("*")]
    engine.shutdown()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def broken_broadcasts(engine: Any, sync: Any) -> dict[str, Any]:
    """What is raised when the trainer's side fails while the engine waits, and when the engine refuses what it got."""
    seen = {}
    # gloo sends no sparse tensors; the engine's norm has 64 elements.
    bad = {"trainer": torch.ones(64).to_sparse(), "engine": torch.ones(3)}
    for side, tensor in bad.items():
        try:
            with engine.weight_update():
                engine.update_weights_from_distributed([("model.norm.weight", tensor)])
        except Exception as error:
            seen[f"{side} failed"] = [type(error).__name__, str(error)]
    return seen


def difference(engine: Any, model: Any) -> float:
    return float(gaps(engine, model, new_tokens=6).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    from harness.runtime.processes import hard_exit

    hard_exit(0)
