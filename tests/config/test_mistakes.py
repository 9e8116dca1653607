"""Wrong configs and command lines: each has one sentence, with the key, the value and what would be right."""

from pathlib import Path

import pytest

from harness.config.facts import Facts
from harness.config.layers import ConfigError
from harness.config.resolve import resolve
from harness.tools.command_line import parse
from tests.end_to_end.launching import run_script

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
}

MISTAKES = [
    # A file or a key that there is not.
    ("missing.toml", "missing.toml is not a file", "give the path of a TOML file"),
    ("broken.toml", "broken.toml is not valid TOML", "line 1, column 5"),
    ("unknown_key.toml", "actor.learning_rat (", "unknown_key.toml) is not a key", "nearest is actor.learning_rate"),
    ("unknown_section.toml", "optimizer (", "the keys there are run, parallel, network, model, engine"),
    ("--actor.lr 1e-5", "actor.lr (command line) is not a key", "nearest is actor.learning_rate"),
    ("--actor.tp 2", "actor.tp", "nearest is parallel.tp"),
    ("--rollout.n 4", "rollout.n (command line) is not a key", "nearest is rollout.responses_per_prompt"),
    ("--algorithm.name grpo", "algorithm.name", "nearest is algorithm.advantage"),
    ("--trainer.total_epochs 1", "trainer (command line) is not a key", "launch/from_verl.py"),
    ("actor_rollout_ref.rollout.name=sglang", "must be a TOML file or an option", "launch/from_verl.py"),
    ("--steps 3", "--steps", "is not an option", "write --run.steps"),
    ("--engine.defaults sglang", "engine.defaults", "is not a key", "engine.preset"),
    ("--engine.preset harness", "engine.preset", 'one of "reproducible", "sglang"', 'got "harness"'),
    (
        "--weights.tolerance_float32 1e-5",
        "weights.tolerance_float32",
        "the keys there are weights.transport, weights.bucket_size_mib",
    ),
    # A value of another type.
    ("wrong_type.toml", "run.steps (", "wrong_type.toml) must be an integer", 'got "3" (a string)'),
    ("section_as_value.toml", "actor (", "must be a table", "got 3 (an integer)"),
    ("table_as_value.toml", "engine.args (", "must be a table", "got 5"),
    ("bool_as_int.toml", "run.steps (", "must be an integer", "got true"),
    ("names_as_string.toml", "memory.offload_optimizer (", 'must be a list of "actor", "critic"', 'got "actor"'),
    ("--actor.minibatch_size eight", "actor.minibatch_size (command line) must be an integer", 'got "eight"'),
    ("--run.steps 2.5", "run.steps (command line) must be an integer", "got 2.5 (a number)"),
    (
        "--memory.offload_optimizer actor,reference",
        "memory.offload_optimizer",
        '"critic"',
        'got ["actor", "reference"]',
    ),
    ("--memory.offload_parameters critic,actor,critic", "memory.offload_parameters", "without repeats", '"critic"]'),
    ("--memory.resume later", "memory.resume", 'one of "staged", "all"', 'got "later"'),
    ("--actor.betas 0.9", "actor.betas (command line) must be a list of 2 numbers", "got [0.9]"),
    ("--actor.betas 0.9,high", "actor.betas (command line) must be a list of 2 numbers", 'got [0.9, "high"]'),
    ("--actor.schedule exponential", "actor.schedule", '"cosine"', 'got "exponential"'),
    ("--algorithm.advantage ppo", "algorithm.advantage", 'one of "gae", "grpo", "rloo"', 'got "ppo"'),
    ("--weights.transport stream", "weights.transport (command line) must be one of", '"pull"', 'got "stream"'),
    ("--model.dtype fp16", "model.dtype", '"float32", "bfloat16", "float16"', 'got "fp16"'),
    # What ends a response, half a run, and what is validated.
    ("--validation.every 2", "validation.every = 2", "set validation.source"),
    ("--validation.before_train true", "validation.before_train", "set validation.source"),
    ("--validation.source A --rollout.load B", "validation.source", "rollout.load"),
    ("--validation.temperature=-1", "validation.temperature must be 0 or more"),
    ("--rollout.stop_token_ids 5 --rollout.ignore_eos true", "rollout.stop_token_ids = [5]", "rollout.ignore_eos"),
    ("--rollout.stop_token_ids=-1", "rollout.stop_token_ids must be", "0 or more"),
    ("--rollout.stop A --engine.args.skip_tokenizer_init true", "rollout.stop", "skip_tokenizer_init"),
    ("--rollout.load A --rollout.save B", "rollout.save", "rollout.load"),
    ("--rollout.load A --rollout.only", "rollout.only", "without an engine"),
    ("--rollout.only --model.weights random", "rollout.only", 'use "checkpoint"'),
    ("--rollout.routing replay --rollout.only", "rollout.routing", 'use "record"'),
    ("--rollout.routing record --parallel.pp 2 --parallel.tp 1", "rollout.routing", "only its own layers' experts"),
    (
        "--rollout.routing record --engine.args.enable_return_routed_experts false",
        "engine.args.enable_return_routed_experts",
        'rollout.routing = "record" needs it',
    ),
    # An option.
    ("quickstart", '"quickstart"', "must be a TOML file or an option", "--section.key VALUE"),
    ("--run.steps", "--run.steps", "has no value", "write --run.steps VALUE"),
    ("--run.steps --run.seed 1", "--run.steps", "has no value"),
    ("--dry-rnu", "--dry-rnu", "is not an option", "nearest is --dry-run"),
    ("--zzz", "--zzz", "is not an option", "--section.key VALUE"),
    ("--cuda-visible-devices 0,1", "--cuda-visible-devices", "is for --dry-run; add it"),
    ("--dry-run=yes", "--dry-run", "yes"),
    ("--dry-run --nnodes two", "--nnodes must be an integer", "got 'two'"),
    ("--dry-run --nnodes 0", "--nnodes must be at least 1", "got 0"),
    ("--dry-run --nnodes 3", "--nnodes must divide the mesh of 2 ranks", "got 3", "--nproc-per-node"),
    (
        "--dry-run --nnodes 2 --cuda-visible-devices 0 --cuda-visible-devices 1 --cuda-visible-devices 2",
        "--cuda-visible-devices",
        "--nnodes 2",
        "got 3",
    ),
    # A range.
    ("--parallel.tp 0", "parallel.tp must be at least 1", "got 0"),
    ("--run.steps 0", "run.steps must be at least 1", "got 0"),
    ("--weights.bucket_size_mib 0", "weights.bucket_size_mib must be at least 1", "got 0"),
    ("--algorithm.kl_coefficient inf", "algorithm.kl_coefficient must be a finite number", "got Infinity"),
    ("--actor.entropy_coefficient inf", "actor.entropy_coefficient must be a finite number", "got Infinity"),
    ("--validation.temperature inf", "validation.temperature must be a finite number", "got Infinity"),
    ("--run.seed -1", "run.seed must be 0 or more", "got -1"),
    ("--actor.learning_rate 0", "actor.learning_rate must be above 0", "got 0.0"),
    ("--run.phase_timeouts.sycn 60", "run.phase_timeouts.sycn = 60", "sycn is not a phase", "nearest is sync"),
    ("--run.phase_timeouts.sync soon", "run.phase_timeouts.sync must be a number of seconds above 0", 'got "soon"'),
    ("--run.timeout_seconds inf", "run.timeout_seconds must be above 0 and at most 1000000", "got Infinity"),
    (
        "--run.phase_timeouts.sync inf",
        "run.phase_timeouts.sync must be a number of seconds above 0 and at most 1000000",
    ),
    (
        "--engine.args.mem_fraction_static 40%",
        "mem_fraction_static must be a number above 0 and at most 1",
        'got "40%"',
    ),
    ("--engine.args.mem_fraction_static 5", "mem_fraction_static must be", "got 5"),
    ("--actor.learning_rate nan", "actor.learning_rate must be a finite number"),
    ("--run.heartbeat_timeout 1", "run.heartbeat_timeout must be at least 3", "got 1.0"),
    ("--run.dir runs/12:30", "run.dir must have no colon", 'got "runs/12:30"'),
    ("--rollout.temperature 0", "rollout.temperature must be at least 1e-06", "greedy", "got 0.0"),
    ("--rollout.temperature 1e-7", "rollout.temperature must be at least 1e-06", "got 1e-07"),
    ("--rollout.top_k 1 --rollout.temperature 0.7", "rollout.top_k must be -1", "at least 2", "greedy", "got 1"),
    ("--rollout.top_k 0", "rollout.top_k must be -1", "at least 2", "got 0"),
    ("--rollout.top_p 1.5", "rollout.top_p must be above 0 and at most 1", "got 1.5"),
    ("--algorithm.lam 1.1", "algorithm.lam must be between 0 and 1", "got 1.1"),
    ("--actor.clip_low 1", "actor.clip_low must be below 1", "got 1.0"),
    ("--engine.base_port 80", "engine.base_port must be between 1024 and 60000", "got 80"),
    ("--task.template Answer:", "task.template must have the field {question}, and only that one", 'got "Answer:"'),
    ("--task.template {question}{hint}", "task.template must have the field {question}, and only that one"),
    ("--task.template {question!r}", "task.template must have the field {question}, and only that one"),
    (
        "--task.template {question}{",
        "task.template must have the field {question}, and only that one",
        "literal braces",
    ),
    ("--actor.betas 0.9,1", "actor.betas must be at least 0 and below 1", "got [0.9, 1.0]"),
    ("--run.epochs -1", "run.epochs must be 0 or more", "got -1"),
    ("--checkpoint.every -1", "checkpoint.every must be 0 or more", "got -1"),
    ("--checkpoint.keep -1", "checkpoint.keep must be 0 or more", "got -1"),
    # A combination.
    ("--actor.warmup_steps 2", 'actor.schedule = "constant"', 'use "constant_with_warmup"'),
    ("--algorithm.critic_warmup 1 --algorithm.advantage grpo", "algorithm.critic_warmup = 1", "no critic", "use 0"),
    (
        "--rollout.only true --checkpoint.every 2",
        "checkpoint.every = 2 cannot work: a checkpoint needs both engine and trainer",
        "remove one",
    ),
    ("--checkpoint.resume latest", 'checkpoint.resume = "latest"', "set checkpoint.folder", "folders step-N"),
    (
        "--parallel.dp 3 --actor.minibatch_size 6",
        "rollout.prompts_per_step must be a multiple of parallel.dp = 3",
        "got 8",
    ),
    (
        "--parallel.tp 3 --actor.minibatch_size 6",
        "rollout.prompts_per_step = 8",
        "16 responses",
        "3 ranks (parallel.tp x parallel.pp)",
    ),
    ("--actor.minibatch_size 5", "actor.minibatch_size must be a multiple of the 2 ranks", "got 5"),
    ("--actor.minibatch_size 6", "actor.minibatch_size must divide the 16 sequences of a step", "got 6"),
    (
        "--actor.tokens_per_microbatch 200",
        "must be 0 (off) or at least task.max_prompt_tokens + rollout.max_response_tokens",
        "got 200",
    ),
    ("--model.attention flash_attention_2", "cannot compute in float32", "auto"),
    (
        "--algorithm.advantage grpo --rollout.responses_per_prompt 1",
        "responses_per_prompt must be at least 2",
        '"grpo"',
    ),
    (
        "--algorithm.advantage rloo --rollout.responses_per_prompt 1",
        "responses_per_prompt must be at least 2",
        '"rloo"',
    ),
    ("--model.master_dtype bfloat16", 'model.master_dtype = "bfloat16"', 'model.dtype = "float32"', 'use "float32"'),
    (
        "--model.dtype float16 --model.master_dtype bfloat16",
        'model.master_dtype = "bfloat16"',
        'model.dtype = "float16"',
        'use "float32"',
    ),
    (
        "--model.dtype float16 --model.master_dtype float16",
        'model.master_dtype = "float16"',
        "AdamW does not work in float16",
        'use "float32"',
    ),
    (
        "--model.dtype float16 --model.rollout_precision fp8_block",
        'model.dtype must be "bfloat16" for model.rollout_precision = "fp8_block"',
    ),
    ("reserved.toml", "engine.args.port = 1", "engine.base_port"),
    ("--engine.args.tp_size 4", "engine.args.tp_size = 4", "parallel.tp"),
    (
        "--engine.args.preferred_sampling_params min_p",
        'engine.args.preferred_sampling_params = "min_p"',
        "log-probs",
        "set the keys of [rollout]",
    ),
    ("--engine.args.quantization fp8", 'engine.args.quantization = "fp8"', "weight updates cannot load", "remove it"),
    (
        "--engine.args.dp_size 2",
        "engine.args.dp_size = 2",
        "does not update the weights of data-parallel replicas",
        "use parallel.dp",
    ),
    (
        "--engine.args.enable_mscclpp true",
        "engine.args.enable_mscclpp",
        "every GPU that the engine sees",
        "remove it",
    ),
    (
        "--engine.args.moe_a2a_backend flashinfer",
        'engine.args.moe_a2a_backend = "flashinfer"',
        "every GPU",
        "remove it",
    ),
    ("--engine.args.quantization awq", 'engine.args.quantization = "awq"', "weight updates cannot load", "remove it"),
    (
        "--engine.args.speculative_algorithm EAGLE3 --weights.transport pull --weights.verify false",
        'weights.transport = "pull"',
        "draft model",
        'use "bucket", "tensor" or "disk"',
    ),
    ("--engine.args.speculative_algorithm EAGLE3", "weights.verify = true", "draft model", "use false"),
    (
        "--model.name some/folder --model.overrides.num_hidden_layers 4",
        "model.overrides.num_hidden_layers = 4",
        "only the tiny models (qwen2, qwen3, llama, qwen3_moe, deepseek_v3, moonlight)",
        '"some/folder"',
    ),
    (
        '--model.overrides.rope_parameters {"rope_type":"default"}',
        "model.overrides.rope_parameters must be a table as TOML writes it",
        "{rope_type =",
    ),
    ('--model.overrides.own_config {"a":1}', "model.overrides.own_config must be a table as TOML writes it"),
    ("--model.overrides.rope_scaling 4", "model.overrides.rope_scaling must be a table", "got 4"),
    ("--model.overrides.quantization_config fp8", "model.overrides.quantization_config must be a table", 'got "fp8"'),
    (
        "--model.weights random --engine.initial_weights checkpoint",
        'engine.initial_weights = "checkpoint"',
        'model.weights = "random"',
        'engine.initial_weights = "dummy"',
    ),
    (
        "--weights.transport distributed --engine.device cuda",
        'weights.transport = "distributed"',
        "NCCL refuses two ranks on one GPU",
        "parallel.colocate = false",
    ),
    (
        "--weights.transport pull --engine.device cuda --parallel.colocate false",
        'weights.transport = "pull"',
        "parallel.colocate = false",
        'use "distributed" or "disk"',
    ),
    ("--parallel.colocate false --engine.device cpu", "parallel.colocate = false", "no GPUs", "use true"),
    ("--weights.transport distributed --parallel.pp 2", 'weights.transport = "distributed"', "parallel.pp = 1"),
    (
        "--memory.offload_optimizer ['critic'] --algorithm.advantage grpo",
        'memory.offload_optimizer = ["critic"]',
        'algorithm.advantage = "grpo" has no critic',
        "remove critic from the list",
    ),
    (
        "--memory.offload_parameters ['actor','reference'] --algorithm.kl_placement none",
        'memory.offload_parameters = ["actor", "reference"]',
        'algorithm.kl_placement = "none" has no reference',
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("arguments", "parts"), [(words, parts) for words, *parts in MISTAKES], ids=lambda each: str(each)
)
def test_each_mistake_names_key_value_and_remedy(arguments: str, parts: list[str], folder: Path) -> None:
    words = [str(folder / word) if word.endswith(".toml") else word for word in arguments.split()]
    with pytest.raises(ConfigError) as caught:
        parse(words)
    said = str(caught.value)
    assert [part for part in parts if part not in said] == [], said
    assert said.endswith(".") and "\n" not in said


def test_a_mistake_exits_2_with_one_line_from_rank_0_only() -> None:
    speaking = run_script("launch/ppo.py", "--actor.lr", "1", RANK="0")
    silent = run_script("launch/ppo.py", "--actor.lr", "1", RANK="1")
    assert (speaking.returncode, silent.returncode) == (2, 2)
    assert (
        speaking.stderr
        == "error: actor.lr (command line) is not a key of this version; the nearest is actor.learning_rate.\n"
    )
    assert (speaking.stdout, silent.stdout, silent.stderr) == ("", "", "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--dry-run", "--nproc-per-node", "4"], "1 * 2 * 1 = 2, but the world size is 4"),
        (["--dry-run", "--cuda-visible-devices", "0,1,0,1", "--parallel.tp", "4"], "lists GPU 0 twice"),
        (["--dry-run", "--cuda-visible-devices", ""], "rank 0 on host host0 has CUDA_VISIBLE_DEVICES=''"),
        (["--check", "--engine.base_port", "80"], "engine.base_port must be between 1024 and 60000, got 80."),
    ],
)
def test_what_cannot_be_placed_exits_2(words: list[str], part: str) -> None:
    done = run_script("launch/ppo.py", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and part in done.stderr


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_no_scheduler_can_open_is_refused(name: str) -> None:
    config = parse(["--weights.transport", "pull"]).config
    setting = {name: "max_split_size_mb:64, Expandable_Segments: True"}
    with pytest.raises(ConfigError) as caught:
        resolve(config, Facts(device="cuda", environment=setting))
    assert str(caught.value).startswith(f'weights.transport = "pull" cannot work: {name}=max_split_size_mb:64')
    assert str(caught.value).endswith("(CUDA IPC); remove expandable_segments from it.")
    resolve(config, Facts(device="cpu", environment=setting))
    resolve(config, Facts(device="cuda", environment={name: "expandable_segments:False"}))
    for config.weights.transport in ("auto", "disk"):
        resolve(config, Facts(device="cuda", environment=setting))


@pytest.mark.parametrize(("old", "now"), [("off", "false"), ("log_probs", "true"), ("full", "true")])
def test_a_level_of_an_older_version_says_what_to_write(old: str, now: str, tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(f'[weights]\nverify = "{old}"\n')
    for words in ([str(tmp_path / "old.toml")], ["--weights.verify", old]):
        with pytest.raises(ConfigError, match=f'must be true or false, got "{old}".*write {now}.$'):
            parse(words)


def test_expandable_segments_exit_2_before_torch_is_imported() -> None:
    words = ["configs/cpu/quickstart.toml", "--engine.device", "cuda", "--weights.transport", "pull"]
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = run_script("launch/ppo.py", *words, **started)
    assert (done.returncode, done.stdout) == (2, "")
    assert 'error: weights.transport = "pull" cannot work: PYTORCH_CUDA_ALLOC_CONF=' in done.stderr


def test_a_password_in_a_refused_value_is_not_printed() -> None:
    words = ("--task.source", "--validation.source", "--trackers.names", "--engine.args.model_path")
    given = [word for key in words for word in (key, "https://bob:hunter2@host/d.jsonl")]
    done = run_script("launch/ppo.py", "configs/cpu/quickstart.toml", "--dry-run", *given)
    assert done.returncode == 2 and done.stderr.count("@host/d.jsonl") == 4, done.stderr
    assert "hunter2" not in done.stderr and "[redacted " in done.stderr


def test_without_torchrun_it_says_how_to_start() -> None:
    done = run_script("launch/ppo.py", "configs/cpu/quickstart.toml")
    assert done.returncode == 2
    command = "bin/torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml"
    assert done.stderr.startswith("error: torchrun did not start this process; start the run with: ")
    assert done.stderr.endswith(f"{command}\n") and len(done.stderr.splitlines()) == 1
