"""What each of two ranks measures of sharded models against whole ones."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM

from harness.config import schema
from harness.task.tiny_models import tiny_config, tiny_model
from harness.trainer.actor import Actor, Reference
from harness.trainer.batch import Batch
from harness.trainer.critic import Critic
from harness.trainer.model import ValueModel, computing_in, load_causal_lm, named_tensors, tied_names
from tests.trainer.sequences import advantage_batch, sequences

CPU = torch.device("cpu")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
"""Name in the measurements -> the tiny model, and fields of its config that are replaced."""
UPDATED = ("qwen3_moe", "deepseek_v3")
"""Those that test_whole_update.py does not compare: transformers' experts have no float64."""
ROLLOUT = schema.Rollout(temperature=0.7, max_response_tokens=12)
KL_IN_LOSS = schema.Algorithm(kl_placement="loss", kl_coefficient=0.1)
ACTOR = {
    "minibatch_size": 8,
    "learning_rate": 0.05,
    "entropy_coefficient": 0.01,
    "max_grad_norm": 0.5,
}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()).detach()


def wholes(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in named_tensors(model)}


def furthest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest difference over all tensors; infinite if the names differ."""
    if left.keys() != right.keys():
        return float("inf")
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def record_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Filled with the clipped gradients when the optimizer steps."""
    gradients: dict[str, Tensor] = {}

    def record(*_: Any) -> None:
        gradients.update({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(record)
    return gradients


def plain_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """One sequence at a time, without padding."""
    log_probs = torch.zeros(batch.input_ids.shape)
    for row in range(len(batch)):
        ids = batch.input_ids[row, : int(batch.attention_mask[row].sum())]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / ROLLOUT.temperature
        log_probs[row, 1 : len(ids)] = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return log_probs


def new_actor(model: nn.Module, mesh: DeviceMesh, **changes: Any) -> Actor:
    updates = schema.ActorConfig(**{**ACTOR, **changes})
    return Actor(model, schema.Config(actor=updates, algorithm=KL_IN_LOSS, rollout=ROLLOUT), mesh, CPU)


def load_value_model(path: str, dtype: torch.dtype, mesh: DeviceMesh, **options: Any) -> ValueModel:
    model = load_causal_lm(path, dtype, CPU, mesh, value_head=True, **options)
    assert isinstance(model, ValueModel)
    return model


def with_sgd(learner: Any) -> None:
    """AdamW steps by the learning rate however small the gradient, so that rounding would decide the sign."""
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=learner.optimizer.param_groups[0]["initial_lr"])


def in_float32(model: nn.Module, held: torch.dtype, mesh: DeviceMesh) -> nn.Module:
    return computing_in(model, torch.float32, held, mesh, CPU)


def measure_log_probs(path: str, mesh: DeviceMesh, local: Batch) -> dict[str, Any]:
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = load_causal_lm(path, torch.float32, CPU, mesh)
    log_probs, entropy = new_actor(model, mesh, microbatch_size=3).log_probs(local)
    eager = load_causal_lm(path, torch.float32, CPU, mesh, attention="eager")
    reference = Reference(eager, schema.Config(rollout=ROLLOUT), mesh, CPU)
    with torch.no_grad():
        expected = plain_log_probs(plain, local)
    mask = local.attention_mask.bool()
    narrow = load_causal_lm(path, torch.float32, CPU, mesh, compute_dtype=torch.bfloat16)
    rounded, exact = (
        new_actor(each, mesh).log_probs(local)[0] for each in (narrow, in_float32(narrow, torch.float32, mesh))
    )
    held, second = (
        {name: each for name, each in wholes(one).items() if "bias" not in name}
        for one in (narrow, in_float32(narrow, torch.bfloat16, mesh))
    )
    value_model = load_value_model(path, torch.float32, mesh)
    critic = Critic(value_model, schema.Config(), mesh, CPU)
    backbone, head = AutoModel.from_pretrained(path, dtype=torch.float32), whole(value_model.value_head.weight)
    values = critic.values(local)
    with torch.no_grad():
        states = backbone(input_ids=local.input_ids, attention_mask=local.attention_mask).last_hidden_state
    buffers = dict(model.named_buffers())

    def off(found: Tensor, right: Tensor = expected, first: int = 0) -> float:
        return float((found - right)[:, first:][mask[:, first:]].abs().max())

    return {
        "weights": furthest(wholes(model), {n: t for n, t in plain.state_dict().items() if n not in tied_names(model)}),
        "buffers": max(float((buffers[name] - buffer).abs().max()) for name, buffer in plain.named_buffers()),
        "buffer_names": len(buffers),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "tied": tied_names(model),
        "log_probs": off(log_probs),
        "eager": off(reference.log_probs(local)[0]),
        "entropy": float(entropy[local.response_mask.bool()].min()),
        "rounding": off(rounded),
        "in_float32": off(exact),
        "held": furthest({name: each.bfloat16().float() for name, each in held.items()}, second),
        "values": off(values, (states @ head[0]).roll(1, 1), first=1),
        "value_spread": float(values[mask].std()),
    }


def measure_update(path: str, mesh: DeviceMesh, alone: DeviceMesh, local: Batch, everyone: Batch) -> dict[str, Any]:
    sharded = new_actor(load_causal_lm(path, torch.float32, CPU, mesh), mesh, microbatch_size=2)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    single = new_actor(plain, alone, microbatch_size=8)
    before = wholes(sharded.model)
    gradients = []
    for actor in (sharded, single):
        with_sgd(actor)
        gradients.append(record_gradients(actor.model, actor.optimizer))
    first = sharded.step(local)
    after_first = wholes(sharded.model)
    alone_first = single.step(everyone)
    largest = max(float(gradient.abs().max()) for gradient in gradients[1].values())
    result: dict[str, Any] = {
        "gradients": furthest(gradients[0], gradients[1]) / largest,
        "gradient_names": len(gradients[0]) - len(list(sharded.model.parameters())),
        "metrics": max(abs(first[name] - alone_first[name]) for name in alone_first),
        "grad_norm": first["grad_norm"],
        "kl": first["kl"],
    }
    sharded.step(local)
    single.step(everyone)
    after = wholes(sharded.model)
    buffers = {name for name, _ in sharded.model.named_buffers()}
    result["weights"] = furthest(after, wholes(single.model))
    result["unchanged"] = [n for n in before if n not in buffers and torch.equal(after_first[n], before[n])]
    result["changed_buffers"] = [n for n in before if n in buffers and not torch.equal(after[n], before[n])]
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, first)
    result["metrics_agree"] = ranks[0] == ranks[1]
    return result


def measure_random(path: str, mesh: DeviceMesh, alone: DeviceMesh) -> dict[str, Any]:
    models = [load_causal_lm(path, torch.bfloat16, CPU, m, weights="random", seed=3) for m in (mesh, alone)]
    other = wholes(load_causal_lm(path, torch.bfloat16, CPU, mesh, weights="random", seed=4))
    values = [load_value_model(path, torch.float32, m, weights="random", seed=3) for m in (mesh, alone)]
    tensors = wholes(models[0])
    norms = torch.cat([t.float() for n, t in tensors.items() if n.endswith("norm.weight")])
    matrices = torch.cat([t.float().flatten() for n, t in tensors.items() if t.ndim > 1])
    return {
        "differences": furthest(tensors, wholes(models[1])),
        "value_differences": furthest(wholes(values[0]), wholes(values[1])),
        "same_as_other_seed": [n for n in tensors if torch.equal(tensors[n], other[n])],
        "norm_mean": float(norms.mean()),
        "norm_std": float(norms.std()),
        "matrix_std": float(matrices.std()),
        "smallest": min(float(t.abs().max()) for t in tensors.values()),
    }


def measure_bfloat16(path: str, mesh: DeviceMesh, local: Batch) -> dict[str, Any]:
    saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    model = load_causal_lm(path, torch.bfloat16, CPU, mesh)
    dtypes = {name: str(tensor.dtype) for name, tensor in named_tensors(model)}
    biases = {name: tensor for name, tensor in wholes(model).items() if name.endswith("e_score_correction_bias")}
    metrics = new_actor(model, mesh, microbatch_size=4).step(local)
    return {
        "dtypes": dtypes,
        "bias_differences": max(float((tensor - saved[name]).abs().max()) for name, tensor in biases.items()),
        "inv_freq_dtypes": sorted({str(b.dtype) for n, b in model.named_buffers() if n.endswith("inv_freq")}),
        "loss": metrics["loss"],
    }


def moved(path: str, mesh: DeviceMesh, local: Batch, dtype: torch.dtype, compute: torch.dtype) -> dict[str, Any]:
    """One AdamW update at 1e-6 of the model with parameters in dtype."""
    model = load_causal_lm(path, dtype, CPU, mesh, weights="random", seed=5, compute_dtype=compute)
    actor = new_actor(model, mesh, microbatch_size=4, learning_rate=1e-6)
    log_probs = actor.log_probs(local)[0]
    before = wholes(model)
    actor.step(local.replace(old_log_probs=log_probs, reference_log_probs=log_probs))
    after = wholes(model)
    parameters = [name for name, _ in model.named_parameters()]
    update = torch.cat([(after[name].double() - before[name].double()).flatten() for name in parameters])
    dtypes = {str(each.dtype) for each in (*model.parameters(), *actor.moments())}
    return {"log_probs": log_probs, "update": update, "dtypes": sorted(dtypes)}


def measure_mixed(path: str, mesh: DeviceMesh, local: Batch) -> dict[str, Any]:
    """float32 masters with bfloat16 compute, and bfloat16 throughout, against float32 throughout."""
    wide, narrow = torch.float32, torch.bfloat16
    full, mixed, pure = (moved(path, mesh, local, *each) for each in ((wide, wide), (wide, narrow), (narrow, narrow)))
    return {
        "forward": float((mixed["log_probs"] - pure["log_probs"]).abs().max()),
        "cosine": [float(torch.cosine_similarity(full["update"], each["update"], dim=0)) for each in (mixed, pure)],
        "moved": [float((each["update"] != 0).double().mean()) for each in (full, mixed, pure)],
        "dtypes": [each["dtypes"] for each in (full, mixed, pure)],
    }


def measure_float16(path: str, mesh: DeviceMesh, local: Batch) -> dict[str, Any]:
    """Gradients in float16 against those in float32, of losses of usual, tiny and huge size; and what never is
    finite."""
    result: dict[str, Any] = {}

    def actor_in(dtype: torch.dtype, size: float) -> tuple[Actor, Batch]:
        model = load_causal_lm(path, torch.float32, CPU, mesh, compute_dtype=dtype)
        config = schema.Config(
            model=schema.Model(dtype="float16" if dtype == torch.float16 else "float32"),
            actor=schema.ActorConfig(minibatch_size=8, max_grad_norm=1e30),
            algorithm=schema.Algorithm(kl_placement="none"),
            rollout=ROLLOUT,
        )
        actor = Actor(model, config, mesh, CPU)
        batch = local.replace(advantages=local.require("advantages") * size)
        return actor, batch.replace(old_log_probs=actor.log_probs(batch)[0])

    def gradient(dtype: torch.dtype, size: float, *, scaled: bool = True) -> tuple[Tensor, dict[str, float], Actor]:
        actor, batch = actor_in(dtype, size)
        if not scaled:
            actor.loss_scale.fill_(1.0)
        gradients = record_gradients(actor.model, actor.optimizer)
        metrics = actor.step(batch)
        return torch.cat([each.flatten() for each in gradients.values()]).double(), metrics, actor

    for name, size in (("usual", 1.0), ("tiny", 1e-6), ("huge", 1e3)):
        wide, metrics, _ = gradient(torch.float32, size)
        narrow, in_float16, actor = gradient(torch.float16, size)
        result[name] = {
            "error": float((narrow - wide).norm() / wide.norm()),
            "grad_norm": in_float16["grad_norm"] / metrics["grad_norm"],
            "loss_scale": in_float16["loss_scale"],
            "saved": float(actor.tensors()["actor/loss_scale"]),
            "has_scale_in_float32": "loss_scale" in metrics,
        }
        if name == "tiny":
            result["unscaled"] = float((gradient(torch.float16, size, scaled=False)[0] - wide).norm() / wide.norm())

    def fails(actor: Actor, batch: Batch) -> dict[str, Any]:
        before, backwards = wholes(actor.model), []
        actor.after_backward.append(lambda: backwards.append(float(actor.loss_scale)))
        said = message(FloatingPointError, lambda: actor.step(batch))
        return {"said": said, "scales": backwards, "weights": furthest(before, wholes(actor.model))}

    result["infinite"] = fails(*actor_in(torch.float16, float("inf")))
    actor, batch = actor_in(torch.float16, 1.0)

    def spoil() -> None:
        local_part = next(actor.model.parameters()).grad.to_local()  # type: ignore[union-attr]
        local_part.view(-1)[0] = float("nan")

    actor.after_backward.append(spoil)
    return result | {"spoiled": fails(actor, batch)}


def message(error: type[Exception], call: Any) -> str:
    """What the error says; fails the worker if the call raises none."""
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__} was raised")


def measure_errors(path: str, mesh: DeviceMesh, local: Batch) -> dict[str, Any]:
    actor = new_actor(load_causal_lm(path, torch.float32, CPU, mesh), mesh)
    silent = local.replace(response_mask=torch.zeros_like(local.response_mask))
    before = wholes(actor.model)
    result: dict[str, Any] = {
        "silent": message(ValueError, lambda: actor.update(silent, torch.Generator())),
    }
    result["weights"] = furthest(before, wholes(actor.model))
    one = torch.zeros_like(local.response_mask)
    one[0] = local.response_mask[0]  # of each rank
    learner = new_actor(actor.model, mesh, minibatch_size=mesh.size())
    result["minibatches"] = len(local) * learner.updates.ppo_epochs
    result["partly"] = learner.update(local.replace(response_mask=one), torch.Generator())
    return result


def measure(rank: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    if rank == 0:
        for name, (kind, overrides) in MODELS.items():
            tiny_model(tiny_config(kind, overrides=overrides), seed=0).save_pretrained(folder / name)
        # As in real models: logits so peaked that bfloat16 decides signs would hide the rest.
        tiny_config("deepseek_v3", overrides={"initializer_range": 0.02}).save_pretrained(folder / "mixed")
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own_group, _ = dist.new_subgroups(group_size=1)
    alone = DeviceMesh.from_group(own_group, "cpu")
    local, everyone = (advantage_batch(*sequences(), rows) for rows in (slice(rank * 4, rank * 4 + 4), slice(0, 8)))
    paths = {name: str(folder / name) for name in (*MODELS, "mixed")}
    found: dict[str, Any] = {f"log_probs/{name}": measure_log_probs(paths[name], mesh, local) for name in MODELS}
    found |= {f"update/{name}": measure_update(paths[name], mesh, alone, local, everyone) for name in UPDATED}
    return found | {
        "random": measure_random(paths["deepseek_v3"], mesh, alone),
        "bfloat16": measure_bfloat16(paths["deepseek_v3"], mesh, local),
        "mixed": measure_mixed(paths["mixed"], mesh, local),
        "float16": measure_float16(paths["qwen2"], mesh, local),
        "errors": measure_errors(paths["qwen2"], mesh, local),
    }
