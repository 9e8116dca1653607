"""Models of their true widths through SGLang's own classes, on the meta device: what arrives, and what is named if it
does not."""

import json
from pathlib import Path

import pytest

from tests.tools.full_size.forks import REPOSITORY, answer_of, full_size

pytestmark = pytest.mark.slow
MODELS = REPOSITORY / "configs" / "models"
THREE = "three that are no matter of each other"
NAMED = {
    THREE: [
        "model.layers.4.self_attn.fused_qkv_a_proj_with_mqa.weight: a parameter of the engine",
        "layers.5.mlp.experts.17.up_porj.weight",
        "model.layers.5.mlp.experts.w13_weight",
        "model.layers.2.input_layernorm.weight: sent as float32, but the engine holds bfloat16",
    ],
    "an expert lost": [
        "model.layers.4.mlp.experts.w13_weight: on engine rank 3",
        "model.layers.4.mlp.experts.w2_weight",
    ],
    "transposed expert, vocabulary cut": [
        "model.layers.3.mlp.experts.50.down_proj.weight",
        "model.embed_tokens.weight",
    ],
    "a layer sent by two stages": [
        "model.layers.4.self_attn.o_proj.weight: sent 2 times",
        "model.layers.4.mlp.experts.63.up_proj.weight: sent 2 times",
    ],
    "experts numbered by the engine's ep_size": [
        "model.layers.3.mlp.experts.64.gate_proj.weight: the engine knows no such parameter",
        "model.layers.3.mlp.experts.w13_weight: a parameter of the engine that nothing sent would fill, in 234881024",
    ],
    "shards sent as the whole": [
        "model.layers.4.self_attn.q_b_proj.weight: sent as [6144, 1536], which is too short",
        "model.layers.2.self_attn.o_proj.weight: sent as [7168, 4096], which is too short",
        "model.layers.1.mlp.gate_proj.weight: sent as [9216, 7168], which is too short",
        "model.layers.5.mlp.experts.9.down_proj.weight: sent as [7168, 1024], which is too short",
    ],
    "refused and lost": [
        "model.layers.3.mlp.experts.50.down_proj.weight: the engine's loader refuses it",
        "model.layers.3.mlp.experts.w2_weight: on engine rank 3",
        "model.layers.3.self_attn.kv_a_layernorm.weight: a parameter of the engine that nothing sent would fill",
        "model.layers.4.self_attn.q_a_layernorm.weight: the engine's loader refuses it",
        "model.layers.5.mlp.gate.e_score_correction_bias: a parameter of the engine",
    ],
    "lost in every layer": [
        "model.layers.0.self_attn.q_a_layernorm.weight: a parameter of the engine that nothing sent would fill; so layers (1, 2)",
    ],
    "float8: scales of one expert": ["model.layers.4.mlp.experts.w13_weight_scale_inv: on engine rank 2"],
    "draft: MTP layer lost": [
        "model.eh_proj.weight: a parameter of the engine",
        "model.decoder.mlp.experts.w13_weight",
    ],
    "draft: an expert lost": ["model.decoder.mlp.experts.w13_weight: on engine rank 3"],
}


def with_layers(model: str, layers: int, folder: Path, **others: object) -> Path:
    """Write a shipped model's config with fewer layers of the same widths. others: further fields."""
    fields = json.loads((MODELS / model / "config.json").read_text())
    if "layer_types" in fields:
        others |= {"layer_types": fields["layer_types"][:layers]}
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": layers} | others))
    return folder


@pytest.mark.long
def test_planted_faults_are_named_and_the_true_checkpoint_has_none(tmp_path: Path) -> None:
    folders = {model: tmp_path / model for model in ("deepseek_v3_bf16", "deepseek_v3")}
    for model, folder in folders.items():
        folder.mkdir()
        with_layers(model, 6, folder, n_routed_experts=64)
    problems = answer_of("tests.tools.full_size.planted_faults:deepseek_v3", *folders.values())
    assert problems["none"] == problems["float8: none"] == problems["draft: none"] == []
    for fault, parts in NAMED.items():
        for part in parts:
            assert any(part in problem for problem in problems[fault]), problems[fault]
    assert len(problems["transposed expert, vocabulary cut"]) == 2, "what is refused is no reason to name others"
    assert sorted(problems[THREE]) == sorted(problems[f"{THREE}, all ranks"]), "one layer of each kind tells as much"


def test_tied_weights_that_are_sent_twice_are_named(tmp_path: Path) -> None:
    """One stage has the embedding in the head's place, and ignores the head.

    The last of two has a head, and takes both.
    """
    found = answer_of(
        "tests.tools.full_size.planted_faults:tied", with_layers("qwen2_5_72b", 2, tmp_path, tie_word_embeddings=True)
    )
    assert found["tied: none"] == []
    assert found["tied: sent twice"] == ["lm_head.weight: the engine knows no such parameter and would ignore it"]
    (sentence,) = found["tied: sent twice to two stages"]
    assert sentence.startswith("lm_head.weight: model.embed_tokens.weight and lm_head.weight fill the same elements")


@pytest.mark.long
def test_a_routing_table_that_is_left_out_is_named(tmp_path: Path) -> None:
    """radixark/miles#2706. transformers' class has it as a buffer, so named_parameters() lacks it."""
    fields = json.loads((MODELS / "deepseek_v4_flash" / "config.json").read_text())
    unquantized = {key: value for key, value in fields.items() if key not in ("quantization_config", "expert_dtype")}
    shorter = {"num_hidden_layers": 3, "compress_ratios": fields["compress_ratios"][:3]}
    (tmp_path / "config.json").write_text(json.dumps(unquantized | shorter))
    found = answer_of("tests.tools.full_size.planted_faults:routing", tmp_path)
    table = "model.layers.1.mlp.topk.tid2eid: a parameter of the engine that nothing sent would fill"
    assert not [each for each in found["routing: none"] if "tid2eid" in each]
    assert [each for each in found["routing: no table"] if "tid2eid" in each] == [table]


@pytest.mark.long
def test_mxfp4_arrives_and_its_lost_scales_are_named(tmp_path: Path) -> None:
    found = answer_of("tests.tools.full_size.planted_faults:mxfp4", with_layers("gpt_oss_120b", 2, tmp_path))
    assert found["mxfp4: none"] == found["mxfp4: each rank padded"] == []
    assert found["mxfp4: no scales"] == [
        "model.layers.1.mlp.experts.w13_weight_scale: a parameter of the engine that nothing sent would fill"
    ]
    (sentence,) = found["mxfp4: blocks in another order"]
    assert "gate_up_proj_blocks: the engine reads its [128, 90, 5760, 16] as another shape" in sentence


@pytest.mark.long
def test_the_draft_model_has_its_own_line_and_what_a_trainer_sends_does_not_fill_it(tmp_path: Path) -> None:
    folder, found = with_layers("glm_4_6", 5, tmp_path), tmp_path / "found.json"
    run = full_size(folder, "--tp", 4, "--speculative-algorithm", "NEXTN", "--json", found)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "draft model: Glm4MoeForCausalLMNextN on 4 ranks" in run.stdout
    assert "fills none of its parameters" in run.stdout
    draft = json.loads(found.read_text())["draft"]
    assert draft["filled_by_trainer"] == [] and draft["sent"]["model.layers.5.eh_proj.weight"] == [
        "bfloat16",
        [5120, 10240],
    ]


@pytest.mark.long
def test_a_class_that_asks_for_a_gpu_is_told_one_and_the_output_says_so(tmp_path: Path) -> None:
    run = full_size(with_layers("deepseek_v3_2", 4, tmp_path), "--tp", 2)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "get_device_capability and was told those of an NVIDIA H200" in run.stdout


@pytest.mark.long
def test_a_class_that_takes_kernels_when_imported_is_built_itself(tmp_path: Path) -> None:
    fields = json.loads((MODELS / "qwen3_5_397b_a17b" / "config.json").read_text())
    fields["text_config"] |= {"num_hidden_layers": 4, "layer_types": fields["text_config"]["layer_types"][:4]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    run = full_size(tmp_path, "--tp", 2, "--speculative-algorithm", "NEXTN")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "draft model: Qwen3_5ForCausalLMMTP on 2 ranks" in run.stdout


@pytest.mark.long
def test_a_class_that_cannot_be_imported_is_125_and_no_other_is_built(tmp_path: Path) -> None:
    fields = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    run = full_size(tmp_path)
    assert run.returncode == 125, run.stdout + run.stderr
    assert "cannot import FalconMambaForCausalLM here: ImportError" in run.stderr.splitlines()[-1], run.stderr


@pytest.mark.long
def test_float8_arrives_in_stages_whose_draft_model_has_an_embedding_that_nothing_fills(tmp_path: Path) -> None:
    folder, found = with_layers("deepseek_v3", 4, tmp_path), tmp_path / "found.json"
    run = full_size(folder, "--tp", 2, "--pp", 2, "--speculative-algorithm", "NEXTN", "--json", found)
    assert run.returncode == 1, run.stderr
    assert "draft model: DeepseekV3ForCausalLMNextN on 2 ranks" in run.stdout
    table = json.loads(found.read_text())
    assert len(table["ranks"]) == 4 and any(name.endswith("_scale_inv") for name in table["sent"])
    [problem] = table["problems"]
    assert problem.startswith("model.embed_tokens.weight")
    last = run.stdout.splitlines()[-1]
    assert "1 problem(s)" in last and f"first: {problem}" in last, run.stdout


def test_a_class_that_does_not_know_attention_dp_is_exit_code_1(tmp_path: Path) -> None:
    run = full_size(with_layers("llama_3_1_405b", 2, tmp_path), "--tp", 4, "--dp-attention", 2)
    last = run.stdout.splitlines()[-1]
    assert run.returncode == 1, run.stderr
    assert "LlamaForCausalLM does not know attention DP" in last and "64 of the 128 attention heads" in last


@pytest.mark.long
def test_a_run_that_does_not_fit_is_exit_code_1(tmp_path: Path) -> None:
    done = full_size(with_layers("qwen3_30b_a3b", 6, tmp_path), "--tp", 4, "--nnodes", 1, "--gpu-memory-gib", 3)
    assert done.returncode == 1
    assert "but the run does not fit its GPUs; first: " in done.stdout.splitlines()[-1]
