import hashlib
import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.schema import TINY_MODELS
from harness.task.arithmetic import make_problems
from harness.task.tiny_models import ARCHITECTURES, is_tiny, save_tiny_model, tiny_config, tiny_model

TEXTS = [problem["question"] + "\n" + problem["answer"] for problem in make_problems(100, seed=0)]
MOE = ("qwen3_moe", "deepseek_v3", "moonlight")
DEEPSEEK = ("deepseek_v3", "moonlight")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tensors_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2", "float32"),
        ("qwen3", "bfloat16"),
        ("llama", "bfloat16"),
        ("qwen3_moe", "bfloat16"),
        ("deepseek_v3", "float32"),
        ("moonlight", "bfloat16"),
    ],
)
def test_same_seed_same_bytes_and_without_weights_the_same_but_for_them(tmp_path, name, dtype):
    first, again, other = (
        hashes(save_tiny_model(name, tmp_path / str(n), seed, dtype, texts=TEXTS)) for n, seed in enumerate((7, 7, 8))
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(first)
    bare = hashes(save_tiny_model(name, tmp_path / "bare", 7, dtype, texts=TEXTS, weights=False))
    assert bare.items() == first.items() - {
        (key, first[key]) for key in ("model.safetensors", "generation_config.json")
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_gives_back_every_tensor(tmp_path, name, dtype):
    dtype_name = str(dtype).removeprefix("torch.")
    save_tiny_model(name, tmp_path, 3, dtype_name, texts=TEXTS)
    made = tensors_of(tiny_model(tiny_config(name), 3, dtype_name))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    loaded = tensors_of(model)
    assert loaded.keys() == made.keys()
    for key, tensor in made.items():
        assert tensor.dtype == (torch.float32 if key.endswith("e_score_correction_bias") else dtype)
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor), key
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype_name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)  # which may be the architecture's own class
    assert len(tokenizer) == model.config.vocab_size == max(tokenizer.get_vocab().values()) + 1
    ids = torch.tensor([tokenizer.encode(TEXTS[0])])
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("name", DEEPSEEK)
def test_the_correction_bias_stays_float32_through_a_second_save(tmp_path, name):
    first = save_tiny_model(name, tmp_path / "a", 0, "bfloat16", texts=TEXTS)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "b")
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert one[BIAS].dtype == two[BIAS].dtype == torch.float32
    assert not torch.equal(one[BIAS], one[BIAS].to(torch.bfloat16).float())
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", MOE)
def test_saved_names_are_per_expert(tmp_path, name):
    save_tiny_model(name, tmp_path, 0, texts=TEXTS)
    names = set(load_file(tmp_path / "model.safetensors"))
    experts = {key.partition(".experts.")[2] for key in names if ".layers.1." in key and ".experts." in key}
    assert experts == {f"{e}.{part}_proj.weight" for e in range(8) for part in ("gate", "up", "down")}
    in_memory = {name for name, _ in tiny_model(tiny_config(name), 0).named_parameters()}
    assert any(re.search(r"experts\.gate_up_proj$", key) for key in in_memory)


def test_deepseek_has_what_sglang_reads(tmp_path):
    for name in DEEPSEEK:
        save_tiny_model(name, tmp_path / name, 0, texts=TEXTS)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["moe_layer_freq"] == 1
        assert config["topk_method"] == "noaux_tc"
        assert config["scoring_func"] == "sigmoid"
        assert config["rope_parameters"]["rope_type"] == "yarn"
        names = set(load_file(tmp_path / name / "model.safetensors"))
        assert BIAS in names
        assert ("model.layers.0.self_attn.q_a_proj.weight" in names) == (name == "deepseek_v3")
        assert ("model.layers.0.self_attn.q_proj.weight" in names) == (name == "moonlight")
    assert json.loads((tmp_path / "moonlight" / "config.json").read_text())["q_lora_rank"] is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_correction_bias_shows_a_router_that_masks_with_zero(device):
    for seed in range(3):
        config = tiny_config("deepseek_v3", device)
        mlp = tiny_model(config, seed).model.layers[1].mlp
        bias = mlp.gate.e_score_correction_bias
        assert (bias < 0).any() and (bias != 0).all() and bias.unique().numel() == len(bias)
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(64, config.hidden_size, generator=generator)
        # So that the logits have a standard deviation of 1, as those of a trained router.
        mlp.gate.weight.data.normal_(std=config.hidden_size**-0.5, generator=generator)
        logits = torch.nn.functional.linear(hidden, mlp.gate.weight.float())
        chosen = next(each for each in mlp.gate(hidden) if not each.is_floating_point())
        right, wrong = (route(logits, bias, config, mask) for mask in (float("-inf"), 0.0))
        assert [set(row) for row in chosen.tolist()] == [set(row) for row in right.tolist()]
        differ = [set(a) != set(b) for a, b in zip(right.tolist(), wrong.tolist(), strict=True)]
        assert sum(differ) > len(differ) / 2
        assert len(right.unique()) > config.n_routed_experts / 2


def route(logits, bias, config, mask):
    """Experts of each token, as arXiv 2412.19437 has it where mask is -inf."""
    scores = (logits.sigmoid() + bias).view(len(logits), config.n_group, -1)
    best = scores.topk(2, dim=-1).values.sum(-1).argmax(-1)
    others = torch.arange(config.n_group) != best[:, None]
    return scores.masked_fill(others[:, :, None], mask).flatten(1).topk(config.num_experts_per_tok).indices


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_is_at_its_default_and_logits_are_neither_flat_nor_peaked(name):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    model = tiny_model(tiny_config(name), 0)
    assert torch.equal(torch.rand(3), expected), "the global generator is left alone"
    for key, tensor in tensors_of(model).items():
        assert tensor.float().std() > 0.01, key
        assert tensor.ndim > 1 or not ((tensor == 0) | (tensor == 1)).any(), key
    with torch.no_grad():
        logits = model(torch.randint(2, 512, (4, 32), generator=torch.Generator().manual_seed(0))).logits
    assert 0.5 < logits.std(dim=-1).mean() < 2.0
    assert torch.softmax(logits, -1).max() < 0.5


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_divide_by_four(name, device):
    config = tiny_config(name, device).to_dict()
    keys = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "vocab_size",
    )
    experts = ("num_experts", "n_routed_experts")
    assert {key: config[key] % 4 for key in (*keys, *experts) if key in config and config[key] % 4} == {}
    if device == "cuda" and name in DEEPSEEK:
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert [config[key] for key in sizes] == [512, 128, 64, 128]
    elif device == "cuda":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        assert head_dim == 64


def test_shape_replaces_fields(tmp_path):
    config = tiny_config("qwen2", overrides={"num_hidden_layers": 4, "tie_word_embeddings": True})
    assert (
        config.num_hidden_layers,
        len(config.layer_types),
        config.tie_word_embeddings,
    ) == (4, 4, True)
    assert tiny_config("deepseek_v3", overrides={"num_attention_heads": 4}).num_key_value_heads == 4
    assert tiny_config("moonlight", overrides={"topk_method": "greedy"}).topk_method == "greedy"
    save_tiny_model("llama", tmp_path, 0, overrides={"vocab_size": 300}, texts=TEXTS)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 300
    assert len(load_file(tmp_path / "model.safetensors")["lm_head.weight"]) == 300


def test_values_that_do_not_make_a_config_are_named():
    with pytest.raises(ValueError, match="'hidden_size': 'big'} does not make a qwen2 config: .*hidden_size"):
        tiny_config("qwen2", overrides={"hidden_size": "big"})


def test_is_tiny():
    assert ARCHITECTURES == TINY_MODELS
    assert all(is_tiny(name) for name in ARCHITECTURES)
    assert not any(is_tiny(name) for name in ("", "qwen", "Qwen/Qwen3-0.6B", "./qwen2"))


def test_names_need_neither_torch_nor_transformers():
    code = (
        "import sys, harness.task.tiny_models, harness.task.data\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_layer_for_multi_token_prediction_is_in_the_checkpoint_and_not_in_the_model(tmp_path):
    layer, plain = (
        {"num_nextn_predict_layers": 1},
        load_file(save_tiny_model("deepseek_v3", tmp_path / "plain", 0, texts=TEXTS) / "model.safetensors"),
    )
    folder = save_tiny_model("deepseek_v3", tmp_path / "mtp", 0, "bfloat16", overrides=layer, texts=TEXTS)
    tensors = load_file(folder / "model.safetensors")
    added = {name.removeprefix("model.layers.2.") for name in tensors.keys() - plain.keys()}
    repeated = {name.removeprefix("model.layers.1.") for name in plain if name.startswith("model.layers.1.")}
    assert added - repeated == {
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight",
    } and repeated < added  # fmt: skip
    assert tensors["model.layers.2.eh_proj.weight"].shape == (64, 128)
    assert tensors["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    loaded = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    assert not any(".layers.2." in name for name in loaded)
