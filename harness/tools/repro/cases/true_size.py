"""Failures that were reported from 8 to 64 GPUs, of models at their true widths: SGLang's own classes on the meta
device.

Only what is known while a model is built and its weights are loaded shows here; what a GPU's kernels do does not.
"""

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.tools.repro.case import Case
from harness.tools.repro.true_size_engine import (
    BLOCK_FLOAT8,
    GROUPS_OF_INT4,
    check_engine,
    checkpoint_tensor,
    full_size,
    import_sglang,
    true_model,
)

if TYPE_CHECKING:
    from harness.weights.tensor_view import TensorView

REQUIRES = ("sglang>=0.5.20", "transformers>=5")


@Case(
    broken="tp 32",
    healthy="tp 16",
    signature=(r"Weight output_partition_size = 576 is not divisible by weight quantization block_n = 128",),
    failure="fp8-block-tp",
    new_python=True,
    requires=REQUIRES,
)
def dsv3_fp8_tp32(broken: bool) -> None:
    """DeepSeek-V3 in float8 cannot be built for 32 GPUs: a rank's rows of the dense layers are no whole blocks."""
    with true_model("deepseek_v3", 4) as folder:
        full_size(folder, "--tp", 32 if broken else 16)


@Case(
    broken="32 ranks share every expert",
    healthy="ep 32: each rank has whole experts",
    signature=(
        r"The output_size of gate's and up's weight = 64 is not divisible by weight quantization block_n = 128",
    ),
    failure="fp8-block-tp",
    new_python=True,
    requires=REQUIRES,
)
def deepseek_r1_experts_tp32(broken: bool) -> None:
    """DeepSeek-R1 on 4 nodes: with dense layers kept whole, the experts' rows are the next that are no whole blocks."""
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = "1"  # or its 64 rows of a rank would be the next
    expert_parallel: dict[str, Any] = {} if broken else {"ep_size": 32}
    with true_model("deepseek_v3", 4) as folder:
        import_sglang(folder)
        check_engine(folder, (), tp=32, moe_dense_tp_size=1, dp_size=32, enable_dp_attention=True, **expert_parallel)


@Case(
    broken="tp 8",
    healthy="tp 8 with ep 8",
    signature=(
        r"The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128",
    ),
    failure="fp8-block-tp",
    new_python=True,
    requires=REQUIRES,
)
def minimax_fp8_tp8(broken: bool) -> None:
    """MiniMax-M2.7 in float8 cannot be built for 8 GPUs without expert parallelism."""
    with true_model("minimax_m2_7", 2) as folder:
        full_size(folder, "--tp", 8, *([] if broken else ["--ep", 8]))


@Case(
    broken="tp 16",
    healthy="tp 8",
    signature=(r"Weight output_partition_size = 2112 is not divisible by weight quantization block_n = 128",),
    failure="fp8-block-tp",
    new_python=True,
    requires=("sglang>=0.5.23", "transformers>=5"),
)
def kimi_k3_fp8_tp16(broken: bool) -> None:
    """Kimi-K3 in blocks of float8 cannot be built for 16 GPUs: a rank's 2112 rows of its dense layer are no whole
    blocks."""
    from unittest.mock import patch

    # The report does not show its float8 config. Only the projections of dense layers and experts are quantized here.
    skipped = ["self_attn", "lm_head", "vision_tower", "mm_projector", "shared_experts", "gate"]
    quantization = {"quantization_config": {**BLOCK_FLOAT8, "modules_to_not_convert": skipped}}
    with true_model("kimi_k3", 2, quantization) as folder:
        import_sglang(folder)
        with patch("torch.cuda.Stream"):  # its class makes streams while it is built
            check_engine(folder, (), tp=16 if broken else 8)


@Case(
    broken="tp 8 with ep 8",
    healthy="tp 8",
    # Off the meta device torch words it as "size of tensor a (16) must match the size of tensor b (128)".
    signature=(
        r"experts\.(gate_up|down)_proj: .*tensor (a )?\(16\) must match the .*\(128\) at non-singleton dimension 0",
    ),
    failure="gpt-oss-expert-parallel",
    new_python=True,
    requires=REQUIRES,
)
def gpt_oss_bf16_ep8(broken: bool) -> None:
    """gpt-oss-120b in bfloat16 does not load with expert parallelism: every rank is given all 128 experts."""
    with true_model("gpt_oss_120b", 2, quantization_config=None, dtype="bfloat16") as folder:
        full_size(folder, "--tp", 8, *(["--ep", 8] if broken else []))


@Case(
    broken="MiniCPM3, whose loader deletes kv_b_proj",
    healthy="DeepSeek-V3, whose loader keeps it",
    signature=(r"can load weights into this model only once: .* removes \S+\.kv_b_proj\.weight",),
    failure="loader-removes-parameters",
    new_python=True,
    requires=REQUIRES,
)
def minicpm3_loads_once(broken: bool) -> None:
    """MiniCPM3's loader deletes a parameter that it needs the next time.

    Its class is given DeepSeek-V3's sizes here.
    """
    fields: dict[str, Any] = {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "v_head_dim": 7168 // 128,  # SGLang's class divides, and does not read the field
        "rope_scaling": None,
    }
    with true_model("deepseek_v3_bf16", 2, **(fields if broken else {})) as folder:
        full_size(folder, "--tp", 2)


@Case(
    broken="transformers' own config class",
    healthy="flat fields, as the hub's config class has them",
    signature=(r"TypeError: unhashable type: 'dict' at sglang/srt/layers/rotary_embedding/",),
    failure="nested-rope-parameters",
    new_python=True,
    requires=REQUIRES,
)
def mimo_nested_rope(broken: bool) -> None:
    """MiMo-V2-Flash's rope parameters, one set for each kind of layer in transformers 5, are no key for get_rope's
    cache."""
    flat: dict[str, Any] = {} if broken else {"model_type": "qwen2"}  # keeps the fields as they are
    with true_model("mimo_v2_flash", 3, quantization_config=None, **flat) as folder:
        import_sglang(folder)
        check_engine(folder, [], tp=4)


@Case(
    broken="tp 16",
    healthy="tp 16 with dp attention 2, so that 8 ranks share the heads",
    # 0.5.12 says it while it loads, newer releases before they build.
    signature=(r"fused qkv_proj (weights are|checkpoint is) TP=8-interleaved; got (attention tp_size=)?16",),
    failure="mimo-fused-qkv-tp",
    new_python=True,
    requires=("sglang>=0.5.12", "transformers>=5"),
)
def mimo_fused_qkv_tp16(broken: bool) -> None:
    """MiMo-V2.5-Pro's fused qkv_proj has 8 parts, one for each key-value head, and 16 ranks cannot share them."""
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8}
    fields: dict[str, Any] = {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "qwen2",  # keeps the fields as they are; the class of MiMo-V2.5-Pro's config is on the hub alone
        "attention_projection_layout": "fused_qkv",
        "hidden_size": 6144,
        **heads,
        **{f"swa_{name}": number for name, number in heads.items()},
        "quantization_config": None,
    }
    with true_model("mimo_v2_flash", 1, **fields) as folder:
        import_sglang(folder)
        import torch

        from harness.weights.fusing import fusing_groups

        name, rows = "model.layers.0.self_attn.qkv_proj.weight", 128 * 192 + 8 * 192 + 8 * 128
        fused = checkpoint_tensor(name, torch.bfloat16, rows, 6144)
        attention: dict[str, Any] = {} if broken else {"dp_size": 2, "enable_dp_attention": True}
        check_engine(folder, fusing_groups([fused]), tp=16, about="qkv_proj", **attention)


@Case(
    broken="tp 16",
    healthy="tp 8, whose shards of 384 rows need no padding",
    signature=(r"experts\.0\.w[123]\.weight: .*(start out of range|start \(\d+\) \+ length \(\d+\) exceeds)",),
    failure="marlin-padded-shards",
    new_python=True,
    release="0.5.16",
)
def dsv4_marlin_tp16(broken: bool) -> None:
    """DeepSeek-V4-Pro on 16 GPUs: the shards of 192 rows are padded to 256, and the loader reads the checkpoint by
    256."""
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = "1"  # its 192 rows of a rank would be no whole blocks of float8
    from unittest.mock import patch

    with true_model("deepseek_v4_pro", 1) as folder:
        import_sglang(folder)
        from sglang.srt.layers.moe.fused_moe_triton import layer

        from harness.weights.fusing import fusing_groups

        with patch.object(layer, "_is_cpu", False):  # on a CPU its loader pads otherwise
            check_engine(
                folder,
                fusing_groups(fp4_expert()),
                tp=16 if broken else 8,
                about=r"experts\.0\.",
                moe_runner_backend="marlin",
            )


@Case(
    broken="the engine's experts are in blocks of float8 (SGLANG_DSV4_FP4_EXPERTS=0)",
    healthy="they are in float4, as the checkpoint's",
    # Off the meta device torch words it as "size of tensor a (56) must match the size of tensor b (224)".
    signature=(
        r"experts\.0\.w[13]\.scale: .*tensor (a )?\(56\) must match the .*\(224\) at non-singleton dimension 1",
    ),
    failure="dsv4-fp4-experts",
    new_python=True,
    requires=REQUIRES,
)
def dsv4_fp4_experts(broken: bool) -> None:
    """DeepSeek-V4-Pro's float4 experts, with a scale for 32 columns, do not fit an engine that expects float8's 128."""
    os.environ["SGLANG_DSV4_FP4_EXPERTS"] = "0" if broken else "1"
    with true_model("deepseek_v4_pro", 1) as folder:
        import_sglang(folder)
        from harness.weights.fusing import fusing_groups

        check_engine(folder, fusing_groups(fp4_expert()), tp=8, about=r"experts\.0\.", ep_size=8)


def fp4_expert() -> "list[TensorView]":
    """Return one expert of DeepSeek-V4-Pro's checkpoint: two float4 numbers to a byte, and a scale for each 32
    columns."""
    import torch

    views = []
    for name, rows, columns in (("w1", 3072, 7168), ("w3", 3072, 7168), ("w2", 7168, 3072)):
        path = f"layers.0.ffn.experts.0.{name}"
        views.append(checkpoint_tensor(f"{path}.weight", torch.int8, rows, columns // 2))
        views.append(checkpoint_tensor(f"{path}.scale", torch.float8_e8m0fnu, rows, columns // 32))
    return views


@Case(
    broken="each call brings 10 tensors",
    healthy="each call brings 1000 tensors",
    signature=(r"fused_qkv_a_proj_with_mqa\.weight: a parameter of the engine that nothing sent would fill",),
    failure="dsv3-qkv-a-split",
    new_python=True,
    requires=REQUIRES,
)
def dsv3_buckets_of_ten(broken: bool) -> None:
    """DeepSeek-V3's q_a_proj and kv_a_proj_with_mqa, cut apart by buckets of 10 tensors, never reach the engine."""
    with true_model("deepseek_v3_bf16", 4) as folder:
        import_sglang(folder)
        import torch

        from harness.tools.full_size.trainer_names import trainer_layout
        from harness.weights.fusing import FusingGroup

        names, size = trainer_layout(folder, torch.bfloat16), 10 if broken else 1000
        buckets = [FusingGroup(views=names[start : start + size]) for start in range(0, len(names), size)]
        check_engine(folder, buckets, tp=16)


@Case(
    broken="wq_a and wkv come in two calls",
    healthy="in one call",
    signature=(r"layers\.0\..*wq_a.*AssertionError: dict_keys\(\['model\.layers\.0\.self_attn\.wqkv_a\.weight'",),
    failure="dsv4-pair-split",
    new_python=True,
    requires=REQUIRES,
)
def dsv4_pair_split(broken: bool) -> None:
    """DeepSeek-V4's loader joins wq_a and wkv, and fails if a bucket ends between them."""
    with true_model("deepseek_v4_pro", 1) as folder:
        import_sglang(folder)
        import torch

        from harness.weights.fusing import FusingGroup

        pair = [
            checkpoint_tensor("layers.0.attn.wq_a.weight", torch.float8_e4m3fn, 1536, 7168),
            checkpoint_tensor("layers.0.attn.wkv.weight", torch.float8_e4m3fn, 512, 7168),
        ]
        calls = [[each] for each in pair] if broken else [pair]
        check_engine(folder, [FusingGroup(views=tuple(call)) for call in calls], tp=8, about=r"wq_a|wkv\.")


@Case(
    broken="model.named_parameters() is sent",
    healthy="model.state_dict() is sent",
    signature=(r"tid2eid: a parameter of the engine that nothing sent would fill",),
    failure="non-parameter-tensors-lost",
    new_python=True,
    requires=REQUIRES,
)
def dsv4_hash_table_lost(broken: bool) -> None:
    """DeepSeek-V4 routes its first layers by a table, tid2eid, which is a buffer of the trainer: parameters alone lack
    it."""
    with true_model("deepseek_v4_pro", 1, expert_dtype=None, quantization_config=None) as folder:
        import_sglang(folder)
        import torch

        from harness.tools.full_size.trainer_names import trainer_names
        from harness.weights.fusing import fusing_groups

        names = trainer_names(folder, torch.bfloat16)
        buffers = {name for name, each in names.tensors.items() if not isinstance(each, torch.nn.Parameter)}
        # Experts are another matter. The engine holds the table in int32, the trainer in int64.
        sent = [view for view in names.layout if ".experts." not in view.name and not (broken and view.of in buffers)]
        sent = [replace(view, dtype=torch.int32) if view.dtype == torch.int64 else view for view in sent]
        check_engine(folder, fusing_groups(sent), tp=8, about="tid2eid")


@Case(
    broken="the names of transformers' class, which has no MTP layer",
    healthy="and those of the checkpoint's MTP layer",
    signature=(r"eh_proj\S*: a parameter of the engine that nothing sent would fill",),
    new_python=True,
    requires=REQUIRES,
)
def mtp_draft_stale(broken: bool) -> None:
    """What a trainer with transformers' class of DeepSeek-V3 sends never fills the draft model."""
    with true_model("deepseek_v3", 4, quantization_config=None) as folder:
        import_sglang(folder, draft=True)
        import torch

        from harness.tools.engine_class.draft_model import mtp_layout
        from harness.tools.full_size.trainer_names import trainer_names
        from harness.weights.fusing import fusing_groups

        sent = trainer_names(folder, torch.bfloat16).layout
        mtp = () if broken else mtp_layout(folder, sent)
        check_engine(
            folder, fusing_groups([*sent, *mtp]), tp=8, about=r"(eh_proj|enorm|hnorm|shared_head\.norm)", draft=True
        )


@Case(
    broken="names as model.state_dict() has them",
    healthy="names as save_pretrained() writes them",
    signature=(
        r"experts\.gate_up_proj: the engine knows no such parameter",
        r"experts\.w13_weight: a parameter of the engine that nothing sent would fill",
    ),
    failure="packed-experts-names",
    new_python=True,
    requires=REQUIRES,
)
def qwen3_235b_packed_experts(broken: bool) -> None:
    """Qwen3-235B's experts under the names that transformers 5 has in memory reach no rank of the engine."""
    with true_model("qwen3_235b_a22b", 1) as folder:
        import_sglang(folder)
        import torch

        from harness.tools.full_size.trainer_names import trainer_names
        from harness.weights.fusing import fusing_groups

        names = trainer_names(folder, torch.bfloat16)
        live = [checkpoint_tensor(name, each.dtype, *each.shape) for name, each in names.tensors.items()]
        check_engine(folder, fusing_groups(live if broken else names.layout), tp=8)


@Case(
    broken="quantization_config.ignore lacks the router's name",
    healthy="it has it",
    signature=(
        r"mlp\.gate\.weight_packed: the engine knows no such parameter",
        r"mlp\.gate\.weight: a parameter of the engine that nothing sent would fill",
    ),
    new_python=True,
    requires=REQUIRES,
)
def int4_router(broken: bool) -> None:
    """GLM-4.6 in int4: a router that the trainer quantizes too arrives under names that the engine ignores."""
    linear = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"]
    ignored = [*linear, "model.embed_tokens.weight", *([] if broken else [r"re:.*mlp\.gate\..*"])]
    quantization = {**GROUPS_OF_INT4, "ignore": ignored}
    with true_model("glm_4_6", 4, quantization_config=quantization) as folder, true_model("glm_4_6", 4) as trainer:
        import_sglang(folder)
        import torch

        from harness.tools.full_size.trainer_names import trainer_layout
        from harness.weights.fusing import fusing_groups

        one_expert = [
            view
            for view in trainer_layout(trainer, torch.bfloat16)
            if ".experts." not in view.name or ".experts.0." in view.name
        ]
        sent = [each for view in one_expert for each in in_int4(view, ignored)]
        check_engine(folder, fusing_groups(sent), tp=8, about=r"mlp\.gate\.|experts\.0\.")


def in_int4(view: "TensorView", ignored: list[str]) -> "list[TensorView]":
    """Return what slime sends in place of a tensor: every matrix that config.json does not ignore is quantized.

    slime: quantize_params_compressed_tensors of megatron_to_hf/processors/quantizer_compressed_tensors.py.
    """
    import torch

    is_ignored = any(
        re.match(rule.removeprefix("re:"), view.name) if rule.startswith("re:") else view.name.startswith(rule)
        for rule in ignored
    )
    if is_ignored or not view.name.endswith(".weight") or len(view.shape) < 2:
        return [view]
    rows, columns = view.shape
    return [
        checkpoint_tensor(f"{view.name}_packed", torch.int32, rows, columns // 8),
        checkpoint_tensor(f"{view.name}_scale", torch.bfloat16, rows, columns // 32),
        checkpoint_tensor(f"{view.name}_shape", torch.int32, 2),
    ]
