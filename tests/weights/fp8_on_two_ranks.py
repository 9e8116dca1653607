"""fp8_on_two_ranks.py FOLDER OPTIONS: run by torchrun, two ranks, real SGLang engines in block-FP8.

OPTIONS, as JSON: model, device, dp, tp, engine arguments, transports, and faults: whether to break what the engine
holds. Through each transport in turn come weights that differ in every tensor from those before; what the engines then
hold and compute is compared with what was sent, and with a reload of it from disk. Each rank writes what it saw as
JSON.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BUCKET_BYTES = 400_000  # several buckets, even of a tiny model
LEFT_OUT = "model.layers.0.self_attn.o_proj.weight_scale_inv"
PROMPTS = [list(range(5, 25)), list(range(30, 47))]
COMMON = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
MOE = {"moe_intermediate_size": 256}
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,  # kv_a_proj_with_mqa has 160 rows: its last block is smaller
    "v_head_dim": 32,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 64},
    "qwen3_moe": COMMON | MOE | {"head_dim": 64},
    "deepseek_v3": COMMON | MOE | LATENT | {"q_lora_rank": 128},
}
"""Tiny models of whole blocks at tp 2."""
WIDE = {"num_attention_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
OVERRIDES_ON_GPU = {
    name: fields | ({**WIDE, "qk_nope_head_dim": 128, "v_head_dim": 128} if name == "deepseek_v3" else {})
    for name, fields in OVERRIDES.items()
}
"""Attention kernels are specialised for the real head sizes of MLA."""


def main(folder: Path, options: Mapping[str, Any]) -> None:
    from harness.rollout.verl_engine import VerlEngine
    from harness.task.tiny_models import save_tiny_model
    from harness.trainer.model import load_causal_lm
    from harness.weights.converter import CheckpointConverter
    from harness.weights.fp8_blocks import Fp8BlockConverter
    from harness.weights.fp8_checkpoint import write_quantized_model
    from harness.weights.sent_model import SentModel
    from harness.weights.sync import WeightSync
    from tests.weights.fp8_in_scheduler import DOUBLE, FLIP

    name, device = options["model"], options["device"]
    if device == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(dist.get_node_local_rank(0))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    if rank == 0:
        overrides = (OVERRIDES if device == "cpu" else OVERRIDES_ON_GPU)[name]
        save_tiny_model(name, folder / "model", 0, "bfloat16", device, overrides, texts=["hello, the quick brown fox"])
        write_quantized_model(str(folder / "model"), folder / "fp8", torch.bfloat16)
    dist.barrier()
    mesh = init_device_mesh("cpu", (options["dp"], options["tp"]), mesh_dim_names=("dp", "tp"))
    engine = VerlEngine(
        mesh["tp"],
        log_dir=folder / "engine",
        model_path=str(folder / "fp8"),
        device=device,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        random_seed=rank,
        custom_weight_loader=[FLIP, DOUBLE],
        **{"max_total_tokens": 16384} | options["arguments"],  # so that others find room on the GPU too
    )
    trainer_mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))

    def load(path: Path) -> Any:
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        return load_causal_lm(str(path), torch.float32, where, trainer_mesh, compute_dtype=torch.bfloat16)

    model = load(folder / "model")
    seen: dict[str, Any] = {}
    for index, transport in enumerate(options["transports"]):
        converter = Fp8BlockConverter(CheckpointConverter(model, torch.bfloat16))
        sync = WeightSync(engine, SentModel(model, converter), transport=transport, folder=folder / "run")
        sync.weights.bucket_bytes = BUCKET_BYTES
        seen[transport] = []
        for turn in range(2):
            change_every_tensor(model, seed=10 * index + turn)
            sync.update_engine()
            seen[transport].append(problems(sync))
        if transport == options["transports"][-1]:
            sync.save(folder / "saved", folder / "fp8")
            seen |= apart(engine, sync, load, folder)
            seen["held"] = {
                copy.into: str(copy.held) for each in sync.loader.coverage for copies in each.copies for copy in copies
            }
            if options["faults"]:
                seen["faults"] = faults(sync)
        sync.close()
    engine.shutdown()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def problems(sync: Any) -> list[str]:
    """What the checks of the levels log_probs and bytes say of what the engine holds."""
    from harness.tools.sync.read_back import read_back
    from harness.weights.verification.comparison import compare_fingerprints, load_again

    compared, back = compare_fingerprints(sync.weights, sync.loader), read_back(sync.weights, sync.loader)
    again = load_again(sync.weights, sync.loader, compared.left)
    return [*compared.wrong, *back.differences, *back.not_covered, *again.wrong, *again.not_covered]


def apart(engine: Any, sync: Any, load: Any, folder: Path) -> dict[str, Any]:
    """How far the engine's log-probs are from those of the same values in the trainer, and what a reload of what was
    sent changes in the engine."""
    from harness.weights.fp8_blocks import E4M3, scale_name
    from harness.weights.verification.comparison import changed_since
    from harness.weights.worker.kept_trace import fingerprint_everything

    dist.barrier()
    exact = folder / "dequantized"
    if dist.get_rank() == 0:
        from safetensors.torch import load_file, save_file

        saved = load_file(folder / "saved" / "model.safetensors")
        plain = {
            name: dequantized(tensor, saved[scale_name(name)]) if tensor.dtype == E4M3 else tensor
            for name, tensor in saved.items()
            if not name.endswith("_scale_inv")
        }
        exact.mkdir()
        for file in (folder / "model").glob("*.json"):
            (exact / file.name).write_bytes(file.read_bytes())
        save_file(plain, exact / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    found: dict[str, Any] = {"dequantized": float(gaps(engine, load(exact)).mean())}
    with engine.weight_update():
        before = engine.ask(fingerprint_everything)
    engine.update_weights_from_disk(str(folder / "saved"))
    return found | {"reload": changed_since(before, sync.loader)}


def dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (weight.float() * each).to(torch.bfloat16)


def faults(sync: Any) -> dict[str, list[str]]:
    """What the checks say after each fault, and after the sync that repairs it."""
    from harness.weights.presync_checks import WeightsRefused
    from tests.weights.fp8_in_scheduler import DOUBLE, FLIP

    seen: dict[str, list[str]] = {}
    for name, loader in {"weight": FLIP, "weight_scale_inv": DOUBLE}.items():
        text = f"model.layers.0.self_attn.o_proj.{name}"
        sync.engine.update_weights_from_tensor(
            [(text, torch.zeros(1, device=sync.sent.model.device))], load_format=loader
        )
        seen[name] = problems(sync)
        sync.update_engine()
        seen[f"{name} repaired"] = problems(sync)
    converter = WithoutOne(sync.weights.converter, LEFT_OUT)
    try:
        type(sync)(sync.engine, replace(sync.sent, converter=converter)).update_engine()
    except WeightsRefused as refused:
        seen["left out"] = [str(refused)]
    return seen


class WithoutOne:
    """A Converter that forgets one tensor."""

    def __init__(self, whole: Any, name: str) -> None:
        self.whole, self.name = whole, name

    def layout(self) -> Any:
        return tuple(view for view in self.whole.layout() if view.name != self.name)

    def tensors(self) -> Any:
        return {name: tensor for name, tensor in self.whole.tensors().items() if name != self.name}


@torch.no_grad()
def change_every_tensor(model: torch.nn.Module, seed: int, by: float = 0.01) -> None:
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        local: Any = parameter.to_local()  # type: ignore[attr-defined]
        local.add_((torch.randn(local.shape, generator=generator) * by).to(local.device))


@torch.no_grad()
def gaps(engine: Any, model: Any, new_tokens: int = 16) -> torch.Tensor:
    """|engine log-prob - trainer log-prob| of what the engine generates; the prompts are always the same ones."""
    asked = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=asked, return_logprob=True)
    found = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        entries = answer["meta_info"]["output_token_logprobs"]
        tokens = torch.tensor([prompt + [entry[1] for entry in entries]], device=model.device)
        log_probs = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        ours = log_probs.gather(-1, tokens[0, len(prompt) :, None])[:, 0].cpu()
        found.append((ours - torch.tensor([entry[0] for entry in entries])).abs())
    return torch.cat(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    from harness.runtime.processes import hard_exit

    hard_exit(0)
