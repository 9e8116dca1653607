"""A folder of configs, models and data of which each lacks something."""

import json
import os
import struct
from pathlib import Path

import pyarrow
from pyarrow import parquet

from harness.tools.verl.plain_script import words_of_script
from harness.tools.verl.translate import translate
from tests.tools.bisection.bisecting import Bench
from tests.tools.full_size.test_full_size import MODELS, with_layers

COMMANDS = Path(__file__).resolve().parents[1] / "tools" / "verl" / "commands"
FILES = {
    "unknown_key.toml": "[actor]\nlearning_rat = 0.1\n",
    "unknown_section.toml": "[optimizer]\nlr = 0.1\n",
    "wrong_type.toml": "[run]\nsteps = '3'\n",
    "section_as_value.toml": "actor = 3\n",
    "table_as_value.toml": "[engine]\nargs = 5\n",
    "bool_as_int.toml": "[run]\nsteps = true\n",
    "names_as_string.toml": "[memory]\noffload_optimizer = 'actor'\n",
    "broken.toml": "[run\nsteps = 3\n",
    "reserved.toml": "[engine.args]\nport = 1\n",
    "old.toml": "[weights]\nverify = 'log_probs'\n",
    "seed.toml": "[run]\nseed = -1\n[actor]\nclip_low = 2.0\n",
    "own.py": "def score(**_): return 1.0\n",
    "file": "",
    "rollouts/step00000-rank0000.safetensors": "",
    "rollouts/step00000-rank0001.safetensors": "",
    "old_run/config.toml": "",
    "plain.sh": "exit 0\n",
    "job.sh": 'python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=sglang actor_rollout_ref.actor.use_dynamic_bsz=True "$@"\n',
    "raw/train.jsonl": '{"question": "?", "answer": "#### 3"}\n',
    "raw/test.jsonl": '{"question": "?", "answer": "#### 3"}\n{"question": "?", "answer": "3"}\n',
    "raw_math/train.jsonl": '{"problem": "?", "solution": "\\\\boxed{3}"}\n',
    "raw_math/test.jsonl": '{"problem": "?", "solution": "\\\\boxed{3"}\n',
}

DEEP = '{"a":' * 100_000 + "0" + "}" * 100_000
HEADER = b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
ONE_TENSOR = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)
INDEX = "model.safetensors.index.json"
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CONFIGS = {
    "bad_config": "{",
    "deep_config": DEEP,
    "list_config": '["a list"]',
    "gpt": '{"model_type": "gpt_neox", "num_hidden_layers": 3}',
    "unknown": '{"model_type": "qwen22"}',
    "old_llama": '{"model_type": "llama"}',
    "quantized": '{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}',
    "norm": '{"model_type": "qwen2", "rms_norm_eps": 1e-6}',
    "mtp": '{"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}',
    "mtp3": '{"model_type": "deepseek_v3", "num_nextn_predict_layers": 3}',
    "heads": json.dumps(DENSE | {"model_type": "qwen3"}),
    "experts": json.dumps(EXPERTS | {"model_type": "qwen3_moe", "num_key_value_heads": 8}),
    **{name: json.dumps({"model_type": name}) for name in ("qwen2_moe", "gpt_oss", "qwen3_next", "minimax_m2")},
}
"""Of models that have all other files."""
FILES_OF_MODELS: dict[str, dict[str, bytes]] = {
    "bad_tokenizer": {"tokenizer_config.json": b"{not JSON"},
    "bad_dtype": {"model.safetensors": ONE_TENSOR.replace(b"F32", b"F99")},
    "deep_header": {"model.safetensors": struct.pack("<Q", len(DEEP)) + DEEP.encode()},
    "truncated": {"model.safetensors": ONE_TENSOR[:-1]},
    "no_header": {"model.safetensors": b"not"},
    "part": {"1.safetensors": ONE_TENSOR, INDEX: b'{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'},
    "bad_index": {"1.safetensors": ONE_TENSOR, INDEX: b"[]"},
}
"""Of llamas."""

ROW = json.dumps({"question": "What is 1 + 1?", "answer": "It is 2. #### 2"})
ROWS = {
    "no_rows": "",
    "few": f"{ROW}\n{ROW}",
    "bad_json": f"{ROW}\n{{",
    "no_column": '{"question": "?"}',
    "no_number": '{"question": "?", "answer": "two"}',
}
TABLES = {
    "no_messages": {"prompt": ["?"] * 9},
    "no_truth": {"prompt": [[{"role": "user", "content": "?"}]] * 9},
    "other_columns": {"text": ["?"] * 9},
}
WRONG_FIELDS: dict[str, dict[str, object]] = {
    "no_class": {"architectures": []},
    "class_is_number": {"architectures": [3]},
    "class_is_null": {"architectures": None},
    "text_is_string": {"text_config": "x"},
    "layers_of_text": {"text_config": {"num_hidden_layers": "24"}},
    "rope_is_string": {"rope_scaling": "yarn"},
    "layers_is_string": {"num_hidden_layers": "24"},
    "heads_is_float": {"num_attention_heads": 64.0},
    "type_is_list": {"model_type": ["qwen2"]},
}
"""Of a Qwen2.5-72B."""


def make_inputs(folder: Path) -> Path:
    """Write all of it."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("empty", "bare", "pipe_config", "data"):
        (folder / name).mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    os.mkfifo(folder / "pipe_config" / "config.json")
    for name, config in CONFIGS.items():
        make_model(folder / name, config, {"model.safetensors": ONE_TENSOR})
    for name, files in FILES_OF_MODELS.items():
        make_model(folder / name, '{"model_type": "llama"}', files)
    for name, text in ROWS.items():
        (folder / "data" / f"{name}.jsonl").write_text(text)
    for name, table in TABLES.items():
        parquet.write_table(pyarrow.table(table), folder / "data" / f"{name}.parquet")
    for name, fields in WRONG_FIELDS.items():
        (folder / name).mkdir()
        found = json.loads((MODELS / "qwen2_5_72b" / "config.json").read_text()) | fields
        (folder / name / "config.json").write_text(json.dumps(found))
    for name in ("heads14", "latent192"):
        (folder / name).mkdir()
    with_layers("qwen3_30b_a3b", 2, folder / "heads14", num_attention_heads=14, num_key_value_heads=2)
    with_layers("deepseek_v3_bf16", 4, folder / "latent192", q_lora_rank=192)
    (folder / "commands").symlink_to(COMMANDS)
    (folder / "job.toml").write_text(
        translate(words_of_script(FILES["job.sh"], [], {}), environment={"HOME": "/h"}).toml
    )
    bench = Bench(folder)
    bench.sites(["code = 0", "code = 0", "code = 1", "code = 1"])
    bench.script("import moving, sys; sys.exit(moving.code)")
    return folder


def make_model(folder: Path, config: str, files: dict[str, bytes]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    for name, content in files.items():
        (folder / name).write_bytes(content)
