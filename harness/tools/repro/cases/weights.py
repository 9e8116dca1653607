"""Weights that the engine does not take, takes wrongly, or has no longer."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import OTHER_WEIGHTS, SAME_BELOW, checkpoint_tensors, tiny_engine

GLM = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.1,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
"""The fields of a tiny GLM-4.6."""
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


@Case(
    broken="flush_cache=False",
    healthy="flush_cache=True",
    signature=(r"cached tokens after the update: [1-9]",),
    engine=True,
)
def cache_not_flushed(broken: bool) -> None:
    """Without a flush after an update, the prefix cache still answers from the old weights."""
    with tiny_engine() as engine:
        engine.generate()
        engine.update(checkpoint_tensors(engine.trainer(seed=1)), flush_cache=not broken)
        print("cached tokens after the update:", engine.generate()["meta_info"]["cached_tokens"], flush=True)


@Case(broken="one tensor a call", healthy="all tensors in one call", signature=(OTHER_WEIGHTS,), engine=True)
def dsv3_qkv_a_split(broken: bool) -> None:
    """DeepSeek-V3's fused qkv_a projection keeps its old weights if each call sends one tensor."""
    with tiny_engine("deepseek_v3") as engine:
        trainer = engine.trainer(seed=1)
        tensors = checkpoint_tensors(trainer)
        for call in [[each] for each in tensors] if broken else [tensors]:
            engine.update(call)
        engine.compare(trainer)


@Case(
    broken='quantization="fp8": SGLang quantizes a checkpoint in bfloat16 while it loads',
    healthy="no quantization",
    signature=(r"'Parameter' object has no attribute 'weight_loader'",),
    engine=True,
)
def fp8_reload(broken: bool) -> None:
    """An engine that quantized its weights to FP8 itself generates with them, but cannot load others."""
    with tiny_engine(dtype="bfloat16", quantization="fp8" if broken else None) as engine:
        engine.generate()
        trainer = engine.trainer(seed=1)
        engine.update(checkpoint_tensors(trainer))
        engine.compare(trainer)


@Case(
    needs="one_gpu",
    broken="a loader that gives each parameter new memory",
    healthy="SGLang's own loader, which copies into the memory that a parameter has",
    signature=(r"graphs decoded with other weights: ",),
    engine=True,
)
def graphs_of_old_memory(broken: bool) -> None:
    """CUDA graphs go on with the weights at the old addresses if an update gives parameters new memory."""
    loader = f"{load_into_new_memory.__module__}.{load_into_new_memory.__name__}"
    with tiny_engine(disable_cuda_graph=False, max_running_requests=4, custom_weight_loader=[loader]) as engine:
        trainer = engine.trainer(seed=1)
        engine.update(checkpoint_tensors(trainer), load_format=loader if broken else None)
        prefill, *decoded = engine.log_prob_gaps(trainer)
    verdict = "the trainer's weights" if fmean(decoded) < SAME_BELOW else "other weights"
    print(
        f"graphs decoded with {verdict}: log-probs {fmean(decoded):.1e} apart, the prefill's {prefill:.1e}", flush=True
    )


def load_into_new_memory(model: Any, tensors: list[tuple[str, Any]]) -> None:
    """Load tensors into new memory: a loader that the schedulers call by its name."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model.load_weights(tensors)


@Case(
    broken="correction biases of -2",
    healthy="correction biases of +2",
    signature=(r"of [1-9]\d* tokens: experts outside of the best group",),
    requires=("transformers>=4.53",),
)
def hf_router_masking(broken: bool) -> None:
    """With negative correction biases transformers picks experts of groups that were not chosen."""
    import torch

    from harness.task.tiny_models import tiny_config, tiny_model

    config, count = tiny_config("deepseek_v3"), 64
    block = tiny_model(config, seed=0).model.layers[1].mlp
    hidden = torch.randn(1, count, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.gate.e_score_correction_bias.fill_(-2.0 if broken else 2.0)
        scores = torch.nn.functional.linear(hidden[0].float(), block.gate.weight.float()).sigmoid()
        routed = block.gate(hidden)
        # Some releases of transformers 5 pick the experts in a second call.
        if hasattr(block, "route_tokens_to_experts"):
            routed = block.route_tokens_to_experts(routed[0] if isinstance(routed, tuple) else routed)
    picked = next(each for each in routed if not each.is_floating_point())  # int [tokens, top_k]
    biased = (scores + block.gate.e_score_correction_bias).view(count, config.n_group, -1)
    best_group = biased.topk(2).values.sum(-1).argmax(-1)
    outside = (picked // biased.shape[-1] != best_group[:, None]).any(-1).sum().item()
    print(f"of {outside} tokens: experts outside of the best group ({count} tokens in all)")


@Case(
    broken="model.named_parameters() is sent",
    healthy="model.state_dict() is sent",
    signature=(r"not sent: \S*e_score_correction_bias", r"the receiver computes other log-probs"),
)
def lost_correction_bias(broken: bool) -> None:
    """named_parameters() leaves out e_score_correction_bias, a buffer of DeepSeek-V3's router."""
    import torch

    from harness.task.tiny_models import tiny_config, tiny_model

    config = tiny_config("deepseek_v3")
    trainer, receiver = tiny_model(config, seed=1), tiny_model(config, seed=0)
    sent = dict(trainer.named_parameters()) if broken else trainer.state_dict()
    for name in sorted(set(trainer.state_dict()) - set(sent)):
        print(f"not sent: {name}")
    receiver.load_state_dict(sent, strict=False)
    tokens = torch.arange(2, 130)[None]
    with torch.no_grad():
        theirs, ours = (model(tokens).logits.log_softmax(-1) for model in (receiver.eval(), trainer.eval()))
    difference = (theirs - ours).abs().mean().item()
    print(f"mean log-prob difference: {difference:.3e}")
    if difference > 1e-5:
        print("the receiver computes other log-probs")


@Case(
    broken="config.json as transformers 5 writes it",
    healthy="with moe_layer_freq, topk_method and scoring_func, as DeepSeek's own has them",
    signature=(r"AttributeError: .*'(moe_layer_freq|topk_method|scoring_func)'",),
    engine=True,
)
def moe_layer_freq(broken: bool) -> None:
    """SGLang misses fields in the config.json that transformers 5 writes for DeepSeek-V3."""

    def strip(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name in ("moe_layer_freq", "topk_method", "scoring_func"):
            del config[name]
        (folder / "config.json").write_text(json.dumps(config))

    with tiny_engine("deepseek_v3", prepare=strip if broken else None) as engine:
        engine.generate()


@Case(
    broken="names as model.state_dict() has them",
    healthy="names as save_pretrained() writes them",
    signature=(OTHER_WEIGHTS,),
    engine=True,
)
def packed_experts_names(broken: bool) -> None:
    """A MoE model's experts keep their old weights if tensors are sent under their names in memory."""
    with tiny_engine("qwen3_moe") as engine:
        trainer = engine.trainer(seed=1)
        engine.update(list(trainer.state_dict().items()) if broken else checkpoint_tensors(trainer))
        engine.compare(trainer)


@Case(
    broken="tie_word_embeddings=True",
    healthy="tie_word_embeddings=False",
    signature=(r"the last stage gets no weight for its head",),
)
def tied_embeddings(broken: bool) -> None:
    """The last pipeline stage never gets a tied lm_head.weight, because no list of parameters has it."""
    from harness.task.tiny_models import tiny_config, tiny_model

    model = tiny_model(tiny_config("qwen2", overrides={"tie_word_embeddings": broken}), seed=0)
    last_stage = [name for name, _ in model.named_parameters() if name.startswith(("model.norm", "lm_head"))]
    if "lm_head.weight" not in last_stage:
        print("the last stage gets no weight for its head")


@Case(
    broken="update_weights_from_tensor alone",
    healthy="between begin_weight_update() and end_weight_update()",
    signature=(r"the answer: \(?False.*begin_weight_update",),
    engine=True,
    requires=("sglang>=0.5.21",),
)
def update_outside_session(broken: bool) -> None:
    """SGLang refuses an update outside of a session by a returned value, without an exception."""
    with tiny_engine() as engine:
        tensors = checkpoint_tensors(engine.trainer(seed=1))
        if broken:
            print("the answer:", engine.engine.update_weights_from_tensor(tensors), flush=True)
        else:
            engine.update(tensors)


@Case(broken="all tensors but one are sent", healthy="all tensors are sent", signature=(OTHER_WEIGHTS,), engine=True)
def weights_did_not_arrive(broken: bool) -> None:
    """A tensor that was not sent keeps its old weights, and the update answers success."""
    with tiny_engine() as engine:
        trainer = engine.trainer(seed=1)
        tensors = dict(checkpoint_tensors(trainer))
        if broken:
            del tensors[DOWN_PROJ]
        engine.update(list(tensors.items()))
        engine.compare(trainer)


@Case(
    broken="an answer before the update",
    healthy="no answer before it",
    signature=(r"the routers compute with other weights: ",),
    engine=True,
    new_python=True,
    release="0.5.18",
)
def stale_copy_of_weights(broken: bool) -> None:
    """GLM-4.6's routers keep a copy of their weights in float32 from the first answer on, which no update reaches."""
    with tiny_engine("qwen3_moe", dtype="bfloat16", prepare=make_glm) as engine:
        if broken:
            engine.generate()
        trainer = _glm(seed=1).to(engine.device)
        engine.update(checkpoint_tensors(trainer))
        apart = fmean(engine.log_prob_gaps(trainer))
    verdict = "the weights of the update" if apart < SAME_BELOW else "other weights"
    print(f"the routers compute with {verdict}: log-probs {apart:.1e} from the trainer's", flush=True)


def make_glm(folder: Path) -> None:
    """Put a tiny GLM-4.6 into the folder of another model; the tokenizer stays."""
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    _glm(seed=0).save_pretrained(folder)


def _glm(seed: int) -> Any:
    """Make a tiny GLM-4.6 with transformers, in bfloat16; the seed chooses its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("glm4_moe", **GLM)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@Case(
    broken="down_proj is sent transposed",
    healthy="it is sent as the checkpoint has it",
    signature=(
        r"param_data\.shape=torch\.Size|Attempted to load weight|The size of tensor a .* must match|"
        r"assert param\.size\(\) == loaded_weight\.size\(\)",
    ),
    engine=True,
)
def wrong_shape_sent(broken: bool) -> None:
    """A tensor of a wrong shape kills the scheduler, which ends its parent too."""
    with tiny_engine() as engine:
        tensors = dict(checkpoint_tensors(engine.trainer(seed=1)))
        if broken:
            tensors[DOWN_PROJ] = tensors[DOWN_PROJ].T.contiguous()
        engine.update(list(tensors.items()))
        engine.generate()
