"""Run by test_architectures.py in a process of its own: SGLang's class of each architecture against transformers'.

SGLang's model is built on the CPU at tp 1 by SGLang's own functions, without its server, so that models are covered of
which the CPU mode has no kernels. Each architecture has a child process, forked when everything is imported: SGLang
keeps one configuration for each process.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MOE = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = {
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 8, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
MLA = DEEPSEEK | {"rope_parameters": YARN, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
DSA = {"index_topk": 32, "index_head_dim": 32, "index_n_heads": 4}
NO_MLA = DEEPSEEK | {"num_key_value_heads": 4, "head_dim": 16}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
MINICPM3 = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 8, "head_dim": 32,
    "num_key_value_heads": 8, "dim_model_base": 64,
}  # fmt: skip
GPT = {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_inner": 128, "n_positions": 256}
TIED = {"tie_word_embeddings": True}
HEADS = {"head_dim": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": MOE, "apertus": {}, "arcee": {}, "cohere": TIED, "cohere2": TIED | {"sliding_window": 64},
    "deepseek_v2": DEEPSEEK | {"rope_parameters": YARN, "topk_method": "greedy"}, "deepseek_v3": MLA,
    "deepseek_v32": MLA | DSA, "dots1": NO_MLA,
    "ernie4_5": HEADS,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 128, "moe_layer_start_index": 1,
                     "moe_layer_end_index": 1, "moe_num_shared_experts": 1},
    "falcon_h1": MAMBA | HEADS | {"mamba_d_ssm": 128},
    "gemma": TIED | HEADS, "gemma2": TIED | HEADS | {"sliding_window": 64},
    "gemma3_text": TIED | HEADS | {"sliding_window": 64}, "glm4": HEADS, "glm4_moe": NO_MLA, "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA | DSA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt2": TIED | GPT, "gpt_bigcode": TIED | GPT, "gptj": GPT | {"rotary_dim": 8},
    "gpt_oss": EXPERTS | HEADS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    "granite": {}, "granite_swa": HEADS | {"sliding_window": 64}, "granitemoe": EXPERTS,
    "granitemoe_swa": EXPERTS | {"sliding_window": 64}, "granitemoeshared": EXPERTS | {"shared_intermediate_size": 128},
    "granitemoehybrid": MAMBA | EXPERTS | {"shared_intermediate_size": 128, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": HEADS,
    "lfm2": TIED | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128},
    "llama": {},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2},
    "mellum": MOE | {"sliding_window": 64}, "minicpm3": MINICPM3, "minimax_m2": EXPERTS | HEADS, "ministral3": {}, "mistral": {}, "mixtral": EXPERTS, "nemotron": {},
    "olmo": {"num_key_value_heads": 8}, "olmo2": {},
    "olmoe": {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64}, "persimmon": {}, "phi": {"num_key_value_heads": 8, "intermediate_size": 256}, "phi3": {}, "qwen2": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 128, "head_dim": 8}, "qwen3": HEADS, "qwen3_moe": MOE,
    "qwen3_5_moe_text": MOE | LINEAR | {"shared_expert_intermediate_size": 128}, "qwen3_5_text": HEADS | LINEAR,
    "qwen3_next": MOE | LINEAR | {"shared_expert_intermediate_size": 128},
    "seed_oss": HEADS, "smollm3": {}, "stablelm": {}, "starcoder2": {},
}  # fmt: skip
"""Architecture, as transformers calls it -> the fields that make it tiny."""
HYBRID = {
    "full_attention_interval": 2, "layer_types": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
ENGINE_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "mamba2": {"rms_norm": True},
    "minimax_m2": {
        "scoring_func": "sigmoid", "rotary_dim": 16, "use_routing_bias": True, "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "qwen3_5_moe_text": HYBRID, "qwen3_5_text": HYBRID, "qwen3_next": HYBRID,
}  # fmt: skip
"""What SGLang's class reads besides, and transformers' config of today does not write."""
GPU_ONLY = ("deepseek_v32", "glm_moe_dsa", "qwen3_5_moe_text", "qwen3_5_text")
"""Those whose classes are not built without the answers of a GPU, in SGLang 0.5.23."""
TRANSPORTS = ("tensor", "pull")


@dataclass(kw_only=True)
class Row:
    """What was seen of one architecture."""

    sent: int = 0
    by_fingerprint: int = 0
    loaded_again: int = 0
    derived: int = 0
    changed_by_checks: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    bits: int = 0
    """Tensors of the engine in which one bit was flipped."""
    missed: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)


def trainer_of(name: str, folder: Path) -> Any:
    """Return transformers' tiny model, and write its config as SGLang reads it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **(COMMON | FIELDS[name]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in [*(each for each in model.parameters() if each.ndim == 1), *model.buffers()]:
            tensor.add_(torch.randn_like(tensor) * 0.1) if tensor.is_floating_point() else None
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | ENGINE_FIELDS.get(name, {})))
    return model


def engine_model_of(name: str, folder: Path) -> Any:
    """Return SGLang's model, built by SGLang's own functions at tp 1; its values are random."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from harness.tools.engine_class.absent_hardware import AssumedGpu, shapes_of_gpu

    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="intel_amx" if name == "gpt_oss" else "torch_native",  # its class takes no other on a CPU
        dtype="float32",
        disable_overlap_schedule=True,
    )
    if name in GPU_ONLY:
        AssumedGpu().answer()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    bootstrap._init_parallel_groups(
        backend="gloo", dist_init_method=f"file://{folder}/meet", server_args=arguments, gpu_id=0
    )
    load = LoadConfig(load_format="dummy")
    config = adjust_config_with_unaligned_cpu_tp(ModelConfig.from_server_args(arguments), load, 1)
    for each in (config.hf_config, config.hf_text_config):
        vars(each).update(ENGINE_FIELDS.get(name, {}))
    if name in GPU_ONLY:
        shapes_of_gpu(config.hf_config)
    bootstrap.init_layer_runtime(model_config=config)
    torch.set_default_dtype(torch.float32)
    model = _initialize_model(config, load, None)
    with torch.no_grad():
        for _, tensor in of_floats(model):
            tensor.uniform_(-0.5, 0.5)
    return model


def of_floats(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model's tensors of floats by name, each once."""
    from harness.weights.traced.model_state import model_tensors

    seen = set()
    for name, tensor in model_tensors(model).items():
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor.detach()


def bits_of(model: Any) -> dict[str, bytes]:
    import torch

    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in of_floats(model)}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return [name for name in other if name in one and one[name] != other[name]]


def see(name: str, folder: Path) -> Row:
    """Sync, check and break one architecture, with each transport."""
    import torch

    from harness.tools.sync.read_back import read_back
    from harness.trainer.model import named_tensors
    from harness.weights.names import names_in_checkpoint
    from harness.weights.sent_model import SentModel
    from harness.weights.sync import WeightSync
    from harness.weights.verification.comparison import ReloadFindings, compare_fingerprints, load_again
    from harness.weights.verification.perturb import perturb
    from tests.weights.toy_model import InProcessEngine

    trainer, row = trainer_of(name, folder), Row()
    model = engine_model_of(name, folder)
    engine: Any = InProcessEngine(model)
    random = {key: tensor.clone() for key, tensor in of_floats(model)}
    before = bits_of(model)

    def checked(sync: WeightSync) -> tuple[list[str], ReloadFindings]:
        compared = compare_fingerprints(sync.weights, sync.loader)
        again = load_again(sync.weights, sync.loader, compared.left)
        row.sent, row.by_fingerprint, row.derived = compared.tensors, compared.compared, again.derived
        row.loaded_again = compared.tensors - compared.compared
        return [*compared.wrong, *again.wrong], again

    for seed, transport in enumerate(TRANSPORTS):
        names = names_in_checkpoint(str(folder))
        sent = SentModel.plain(trainer, names=names)
        sync = WeightSync(engine, sent, transport=transport)
        if not seed:
            sync.loader.trace()
            row.changed_by_checks += differing(before, bits_of(model))
        perturb(dict(named_tensors(trainer)), seed)
        sync.update_engine()
        held = bits_of(model)
        wrong, again = checked(sync)
        row.not_covered += [*again.not_covered, *sync.unfilled]
        row.false_alarms += [*wrong, *read_back(sync.weights, sync.loader).differences]
        row.changed_by_checks += differing(held, bits_of(model))
        sync.close()
    for key, tensor in of_floats(model):
        filled = (random[key] != tensor).nonzero() if key in random and random[key].shape == tensor.shape else None
        if filled is not None and not len(filled):
            continue  # no load fills it: a table of angles, or what the verdict names
        place = tuple(filled[len(filled) // 2].tolist()) if filled is not None else (0,) * tensor.ndim
        element = tensor[place].view({4: torch.int32, 2: torch.int16}[tensor.itemsize])
        element ^= 1
        row.bits += 1
        row.missed += [] if checked(sync)[0] else [key]
        element ^= 1
    return row


def main(names: list[str]) -> None:
    """Print one line of JSON for each architecture: its row, or what was raised."""
    from harness.runtime.cpu_standins import activate

    activate()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    import sglang

    from harness.tools.engine_class.absent_hardware import define_kernels

    define_kernels(Path(sglang.__file__).parent / "srt" / "models")
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry

    context = multiprocessing.get_context("fork")
    for name in names or FIELDS:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(name, sender))
        child.start()
        sender.close()
        try:
            print(json.dumps({"name": name} | receiver.recv()), flush=True)
        except EOFError:
            print(json.dumps({"name": name, "raised": "its process died"}), flush=True)
        child.join()


def _child(name: str, sender: Any) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            seen: dict[str, Any] = vars(see(name, Path(folder)))
    except Exception as error:
        seen = {"raised": f"{type(error).__name__}: {error}"}
    sender.send(seen)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1:])
