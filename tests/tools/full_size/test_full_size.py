"""Models of their true widths through SGLang's own classes, on the meta device: what arrives, and what is named if it
does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[3]
MODELS = REPOSITORY / "configs" / "models"
NAMED = {
    "half a fused pair": ["model.layers.4.self_attn.fused_qkv_a_proj_with_mqa.weight: a parameter of the engine"],
    "an expert's name": ["layers.5.mlp.experts.77.up_porj.weight", "model.layers.5.mlp.experts.w13_weight"],
    "an expert lost": [
        "model.layers.4.mlp.experts.w13_weight: on engine rank 3",
        "model.layers.4.mlp.experts.w2_weight",
    ],
    "transposed expert": ["model.layers.3.mlp.experts.200.down_proj.weight"],
    "vocabulary cut": ["model.embed_tokens.weight"],
    "a dtype": ["model.layers.2.input_layernorm.weight: sent as float32, but the engine holds bfloat16"],
    "a layer sent by two stages": [
        "model.layers.4.self_attn.o_proj.weight: sent 2 times",
        "model.layers.4.mlp.experts.255.up_proj.weight: sent 2 times",
    ],
    "experts numbered by the engine's ep_size": [
        "model.layers.3.mlp.experts.256.gate_proj.weight: the engine knows no such parameter",
        "model.layers.3.mlp.experts.w13_weight: a parameter of the engine that nothing sent would fill, in 939524096",
    ],
    "shards sent as the whole": [
        "model.layers.4.self_attn.q_b_proj.weight: sent as [6144, 1536], which is too short",
        "model.layers.2.self_attn.o_proj.weight: sent as [7168, 4096], which is too short",
        "model.layers.1.mlp.gate_proj.weight: sent as [9216, 7168], which is too short",
        "model.layers.5.mlp.experts.9.down_proj.weight: sent as [7168, 1024], which is too short",
    ],
    "refused and lost": [
        "model.layers.3.mlp.experts.200.down_proj.weight: the engine's loader refuses it",
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


def full_size(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/full_size.py", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def planted(faults: str, *folders: Path) -> dict[str, list[str]]:
    """Return the problems of each planted fault, of one process that imports SGLang once."""
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("planted_faults.py"), faults, *folders],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    models = ("deepseek_v3_bf16", "deepseek_v3")
    return planted("deepseek_v3", *(with_layers(model, 6, tmp_path_factory.mktemp(model)) for model in models))


@pytest.mark.long
def test_the_true_checkpoint_has_no_problem(problems: dict[str, list[str]]) -> None:
    assert problems["none"] == problems["float8: none"] == []


@pytest.mark.long
def test_a_refused_tensor_is_not_the_reason_to_name_others(problems: dict[str, list[str]]) -> None:
    assert len(problems["transposed expert"]) == len(problems["vocabulary cut"]) == 1


def test_tied_weights_that_are_sent_twice_are_named(tmp_path: Path) -> None:
    """One stage has the embedding in the head's place, and ignores the head.

    The last of two has a head, and takes both.
    """
    found = planted("tied", with_layers("qwen2_5_72b", 2, tmp_path, tie_word_embeddings=True))
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
    found = planted("routing", tmp_path)
    table = "model.layers.1.mlp.topk.tid2eid: a parameter of the engine that nothing sent would fill"
    assert not [each for each in found["routing: none"] if "tid2eid" in each]
    assert [each for each in found["routing: no table"] if "tid2eid" in each] == [table]


@pytest.mark.long
def test_mxfp4_arrives_and_its_lost_scales_are_named(tmp_path: Path) -> None:
    found = planted("mxfp4", with_layers("gpt_oss_120b", 2, tmp_path))
    assert found["mxfp4: none"] == found["mxfp4: each rank padded"] == []
    assert found["mxfp4: no scales"] == [
        "model.layers.1.mlp.experts.w13_weight_scale: a parameter of the engine that nothing sent would fill"
    ]
    (sentence,) = found["mxfp4: blocks in another order"]
    assert "gate_up_proj_blocks: the engine reads its [128, 90, 5760, 16] as another shape" in sentence


@pytest.mark.long
def test_the_draft_model_takes_the_published_names(problems: dict[str, list[str]]) -> None:
    assert problems["draft: none"] == []


@pytest.mark.long
@pytest.mark.parametrize("fault", NAMED)
def test_a_planted_fault_is_named(fault: str, problems: dict[str, list[str]]) -> None:
    for part in NAMED[fault]:
        assert any(part in problem for problem in problems[fault]), problems[fault]


@pytest.mark.long
def test_ranks_that_get_one_layer_of_each_kind_find_what_all_names_find(problems: dict[str, list[str]]) -> None:
    assert sorted(problems["an expert's name"]) == sorted(problems["an expert's name, all ranks"])


@pytest.mark.long
def test_block_float8_and_pipeline_stages_pass(tmp_path: Path) -> None:
    folder = with_layers("deepseek_v3", 6, tmp_path)
    run = full_size(folder, "--tp", 4, "--pp", 2, "--json", tmp_path / "found.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("VERDICT: every name arrives whole")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["ranks"]) == 8 and found["problems"] == []
    assert any(name.endswith("_scale_inv") for name in found["sent"])


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
def test_with_stages_the_draft_model_has_an_embedding_that_nothing_fills(tmp_path: Path) -> None:
    folder = with_layers("deepseek_v3", 4, tmp_path)
    run = full_size(folder, "--tp", 2, "--pp", 2, "--speculative-algorithm", "NEXTN")
    assert run.returncode == 1, run.stderr
    assert "draft model: DeepseekV3ForCausalLMNextN on 2 ranks" in run.stdout
    last = run.stdout.splitlines()[-1]
    assert "1 problem(s)" in last and "first: model.embed_tokens.weight" in last, run.stdout


@pytest.mark.long
def test_a_failure_reported_from_32_gpus_comes_with_its_own_words() -> None:
    """sgl-project/sglang#3491 and #4791."""
    run = full_size("deepseek_v3", "--tp", 32)
    last = run.stdout.splitlines()[-1]
    assert run.returncode == 1, run.stderr
    assert "Weight output_partition_size = 576 is not divisible by weight quantization block_n = 128" in last


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["no_such_model"], 2, "must be a folder with a config.json"),
        (["deepseek_v3", "--tp", "24"], 2, "128 attention heads"),
        (["deepseek_v3", "--tp", "16", "--ep", "3"], 2, "--ep must be 1 or more and divide --tp 16"),
        (["deepseek_v3", "--speculative-algorithm", "EAGLE3"], 2, "--speculative-algorithm must be NEXTN or EAGLE"),
        (["kimi_k2", "--speculative-algorithm", "NEXTN"], 2, "num_nextn_predict_layers"),
        ([], 2, "give one MODEL"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments: list[str], code: int, part: str) -> None:
    run = full_size(*arguments)
    assert run.returncode == code and part in run.stderr.splitlines()[-1], run.stderr


def test_a_class_that_does_not_know_attention_dp_is_exit_code_1(tmp_path: Path) -> None:
    run = full_size(with_layers("llama_3_1_405b", 2, tmp_path), "--tp", 4, "--dp-attention", 2)
    last = run.stdout.splitlines()[-1]
    assert run.returncode == 1, run.stderr
    assert "LlamaForCausalLM does not know attention DP" in last and "64 of the 128 attention heads" in last


def test_an_architecture_that_sglang_lacks_is_125(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"], "model_type": "llama"}))
    run = full_size(tmp_path)
    assert run.returncode == 125 and "has no class for NobodysForCausalLM" in run.stderr.splitlines()[-1], run.stderr


def test_a_whole_run_says_what_fits(tmp_path: Path) -> None:
    table = tmp_path / "found.json"
    done = full_size("qwen3_30b_a3b", "--tp", 4, "--nnodes", 2, "--json", table, "--actor.microbatch_size", 1)
    assert done.returncode == 0, done.stderr
    assert "it fits; generate is the fullest stage" in done.stdout.splitlines()[-1]
    run = json.loads(table.read_text())["run"]
    assert list(run["stages"]) == ["sync", "generate", "log_probs", "update_actor"]
    assert run["fits"] and run["problems"] == []


@pytest.mark.long
def test_a_run_that_does_not_fit_is_exit_code_1() -> None:
    done = full_size("qwen3_30b_a3b", "--tp", 4, "--nnodes", 1, "--gpu-memory-gib", 24)
    assert done.returncode == 1
    assert "but the run does not fit its GPUs; first: " in done.stdout.splitlines()[-1]
