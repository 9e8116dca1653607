"""--names: somebody's own export against the engine that a config.json describes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.config.layers import ConfigError
from harness.tools.engine_class.draft_model import copies_in
from harness.tools.engine_class.engine_answer import EngineAnswer
from harness.tools.full_size.export_answer import ExportAnswer
from harness.tools.full_size.exported_names import call_function, read_export
from harness.tools.full_size.model_and_options import Options, read_question
from harness.tools.full_size.model_verdict import Answer
from harness.tools.full_size.name_lists import Expected, lists_of
from harness.tools.verify.question import check_folder
from harness.weights.findings import Finding
from harness.weights.tensor_view import TensorView
from tests.tools.full_size.forks import REPOSITORY, answer_of

LISTS = ("sent_and_not_expected", "expected_and_not_sent", "other_shapes_or_dtypes")
NAMED: dict[str, dict[str, dict[str, int]]] = {
    "prefix": {"sent_and_not_expected": {"module.model.embed_tokens.weight": 1}},
    "some lost, others halved": {
        "expected_and_not_sent": {
            "model.layers.0.self_attn.q_norm.weight": 2,
            "model.layers.1.mlp.experts.7.gate_proj.weight": 1,
            "lm_head.weight": 1,
        },
        "other_shapes_or_dtypes": {"model.layers.0.self_attn.o_proj.weight": 2},
    },
    "other names": {
        "sent_and_not_expected": {
            "model.layers.0.mlp.experts.0.gate_up_proj.weight": 16,
            "model.layers.0.self_attn.q_proj.qweight": 2,
        }
    },
    "counted from the stage": {"sent_and_not_expected": {"model.layers.3.self_attn.q_proj.weight": 1}},
}
"""Export -> list -> names that it must have, and how many names each of these lines counts."""
CAUSES = {
    "prefix": "the prefix module.; without it all",
    "counted from the stage": "layer 3 is sent besides and layer 1 is not sent",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE: two layers of eight experts, with a head of its own."""
    made = tmp_path_factory.mktemp("qwen3_moe")
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128,
        "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(fields))
    return made


@pytest.mark.slow
def test_what_is_wrong_with_an_export_is_named_and_a_right_one_is_silent(folder: Path) -> None:
    answers = answer_of("tests.tools.full_size.exported_names_of:answers", folder)
    right = answers["right, with a table"]
    assert right["code"] == 0 and right["passed_over"] and not any(right[title] for title in LISTS)
    for export, lists in NAMED.items():
        found = answers[export]
        assert found["code"] == 1
        for title, names in lists.items():
            assert names.items() <= {each["name"]: each["count"] for each in found[title]}.items(), found
        assert CAUSES.get(export, "") in " ".join(found["causes"])


DENSE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
FOUR_BITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": (DENSE, {"desc_act": False, "sym": True}),
    "awq": (
        {
            **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
        {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["mlp.gate"]},
    ),
}  # fmt: skip
"""quant_method -> config.json and further fields of its quantization. A CPU builds no experts in AWQ: the class of a GPU
is awq_marlin."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.long)])
def test_four_bits_arrive_and_a_lost_scale_is_named_by_the_index_alone(method: str, tmp_path: Path) -> None:
    fields, more = FOUR_BITS[method]
    quantized = {"quant_method": method, "bits": 4, "group_size": 128, **more}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": quantized}))
    answers = answer_of("tests.tools.full_size.exported_names_of:answers", tmp_path)
    right, lost = answers["shapes"], answers["index without scales of k"]
    assert [each["name"] for each in lost["expected_and_not_sent"]] == ["model.layers.1.self_attn.k_proj.scales"]
    assert lost["code"] == 1 and not lost["sent_and_not_expected"] and not lost["other_shapes_or_dtypes"]
    assert right["code"] == 0 and not any(right[title] for title in (*LISTS, "passed_over"))


@pytest.mark.slow
def test_an_index_without_its_files_says_so_and_the_lists_come_first(folder: Path, tmp_path: Path) -> None:
    names = answer_of("tests.tools.full_size.exported_names_of:right_names", folder)
    index = tmp_path / "model.safetensors.index.json"
    sent = {name: "model-00001-of-00002.safetensors" for name in names if "k_norm" not in name}
    index.write_text(json.dumps({"weight_map": sent}))
    command = [sys.executable, "launch/full_size.py", folder, "--tp", "2", "--names", index]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("building", "importing"))][1:]
    assert done.returncode == 1, done.stderr
    assert lines[0] == "sent and not expected: none"
    assert lines[2].startswith("  model.layers.0.self_attn.k_norm.weight: bfloat16 [32], fills")
    assert f"dtype and shape of {len(sent)} names are not known" in done.stdout
    assert "2 expected and not sent" in lines[-1]


def test_files_are_read_by_their_headers(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, file)
    for source in (file, tmp_path):
        export = read_export(str(source))
        assert export and [(view.name, view.dtype, view.shape) for view in export.views()] == [
            ("a.weight", torch.bfloat16, (2, 3))
        ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{}", "must have weight_map"),
        ("[1]", "must hold a JSON object"),
        ('{"sent": {"a": ["bfloat16", [-1]]}}', "a dtype and a shape"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "a file of that folder"),
        ('{"weight_map": {}}', "has no tensors"),
    ],
)
def test_a_file_that_is_no_export_is_refused_in_one_sentence(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "sent.json").write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_export(str(tmp_path / "sent.json"))


def test_a_lora_adapter_is_refused_in_one_sentence_wherever_it_lies(tmp_path: Path) -> None:
    """Its head may be there whole (modules_to_save). A model that is sent with an adapter beside is none."""
    adapter = {"model.layers.0.q_proj.lora_A.weight": torch.zeros(2, 4), "lm_head.weight": torch.zeros(4, 4)}
    file = tmp_path / "adapter_model.safetensors"
    save_file(adapter, file)
    (tmp_path / "adapter_config.json").write_text("{}")
    for refuse in (
        lambda: read_export(str(file)),
        lambda: read_export(str(tmp_path)),
        lambda: check_folder("--weights", tmp_path, config=True),
    ):
        with pytest.raises(ConfigError, match="LoRA adapter .* 1 tensors such as model.layers.0.q_proj.lora_A"):
            refuse()
    save_file({**adapter, "model.layers.0.q_proj.weight": torch.zeros(4, 4)}, file)
    assert read_export(str(file))


def test_what_is_neither_file_nor_function_or_would_be_unpickled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    for source in (str(tmp_path / "absent"), str(tmp_path / "model.bin")):
        with pytest.raises(ConfigError, match="module:function"):
            read_export(source)
    with pytest.raises(ConfigError, match="one engine"):
        read_question("deepseek_v3_bf16", Options(names="a:b", nnodes=2, tp=16), (), tmp_path)


def test_half_a_bias_is_named_though_the_loader_takes_it_for_padded() -> None:
    due = TensorView.whole("model.layers.0.mlp.experts.gate_up_proj_bias", torch.bfloat16, (4, 16))
    half = TensorView.whole(due.name, torch.bfloat16, (4, 8))
    silent = EngineAnswer(ranks=(), findings=())
    lists = lists_of([half], silent, Expected(tensors={due.name: due}), {})
    assert [each.about for each in lists.misshapen] == [
        "sent as bfloat16 [4, 8], expected bfloat16 [4, 16]: 1/2 of axis 1, as a shard has"
    ]
    found = ExportAnswer(engine=silent, draft=None, lists=lists, causes=())
    question = read_question("gpt_oss_120b", Options(), (), Path())
    assert Answer(name="gpt_oss_120b", options=Options(), question=question, engine=silent, exported=found).code == 1


def test_each_name_is_in_one_list_with_those_of_the_layers_that_are_alike() -> None:
    """Refused as unknown, read by nobody, lost because another name does not arrive, and not sent at all."""
    ends = ("q.weight", "k.weight", "norm.weight")
    due = {
        name: TensorView.whole(name, torch.bfloat16, (4,))
        for end in ends
        for name in (f"layers.{n}.{end}" for n in (0, 1))
    }
    sent = [due["layers.0.q.weight"], due["layers.1.q.weight"]]
    sent += [
        TensorView.whole(f"layers.{n}.{end}", torch.bfloat16, (4,)) for n in (0, 1) for end in ("k.qweight", "extra")
    ]
    refused = {"error": "KeyError: 'layers.0.k.qweight'"}
    answer = EngineAnswer(
        ranks=(),
        findings=(
            Finding(kind="refused", tensor="layers.0.k.qweight", layers=(1,), counts=refused),
            Finding(kind="unknown", tensor="layers.0.extra", layers=(1,)),
            Finding(kind="rounded", tensor="layers.0.q.weight", counts={"sent": "float32", "held": "bfloat16"}),
            Finding(kind="unfilled", tensor="layers.0.q.weight", layers=(1,)),
            Finding(kind="unfilled", tensor="layers.0.norm.weight", layers=(1,)),
        ),
    )
    fills = {f"layers.*.{end}": {f"layers.*.{end}"} for end in ends}
    lists = lists_of(sent, answer, Expected(tensors=due), fills)
    assert {(each.kind, each.tensor) for each in lists.unexpected} == {
        *(("no such name", f"layers.{n}.k.qweight") for n in (0, 1)), *(("unread", f"layers.{n}.extra") for n in (0, 1)),
    }  # fmt: skip
    assert [(each.kind, each.tensor) for each in lists.misshapen] == [("misshapen", "layers.0.q.weight")]
    assert [each.tensor for each in lists.unsent] == ["layers.0.norm.weight", "layers.1.norm.weight"]


def test_copies_of_embedding_and_head_in_an_mtp_layer_are_no_problem_in_glm_either() -> None:
    names = ["model.layers.92.embed_tokens.weight", "model.layers.92.shared_head.head.weight"]
    sent = [TensorView.whole(name, torch.bfloat16, (8, 4)) for name in (*names, "model.layers.92.enorm.weight")]
    assert copies_in(REPOSITORY / "configs/models/glm_4_6", sent) == set(names)


SENDER = """
import torch
def tensors():
    yield "a", torch.zeros(2, device="meta")
    yield "a", torch.zeros(3)
def wrong():
    raise RuntimeError("no model")
"""


def test_a_function_yields_names_dtypes_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "2_senders.py").write_text(SENDER)
    monkeypatch.chdir(tmp_path)
    assert read_export("2_senders:tensors") is None, "it is called once torch is imported"
    export = call_function("2_senders:tensors")
    assert [(view.name, view.shape) for view in export.views()] == [("a", (2,)), ("a", (3,))]
    for source, words in (("2_senders:wrong", "RuntimeError: no model"), ("2_senders:absent", "AttributeError")):
        with pytest.raises(ConfigError, match=words):
            call_function(source)
