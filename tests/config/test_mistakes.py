"""Wrong configs and command lines: each has its one sentence, with the key, the value and what would be right."""

from pathlib import Path

import pytest

from harness.config.command import parse
from harness.config.layers import RENAMED, ConfigError, Layer, all_keys, build_config
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
    (
        "unknown_key.toml",
        "actor.learning_rat ({dir}/unknown_key.toml) is not a key; the nearest is actor.learning_rate.",
    ),
    (
        "unknown_section.toml",
        "optimizer ({dir}/unknown_section.toml) is not a key; the keys there are run, parallel, network, model,"
        " engine, task, rollout, algorithm, actor, critic, weights, memory.",
    ),
    ("wrong_type.toml", 'run.steps = "3" ({dir}/wrong_type.toml) is a string; it must be an integer.'),
    ("section_as_value.toml", "actor = 3 ({dir}/section_as_value.toml) is an integer; it must be a table."),
    ("table_as_value.toml", "engine.args = 5 ({dir}/table_as_value.toml) is an integer; it must be a table."),
    ("bool_as_int.toml", "run.steps = true ({dir}/bool_as_int.toml) is true or false; it must be an integer."),
    (
        "names_as_string.toml",
        'memory.offload_optimizer = "actor" ({dir}/names_as_string.toml) is a string; it must be a list of "actor",'
        ' "critic".',
    ),
    (
        "--memory.offload_optimizer actor,reference",
        'memory.offload_optimizer = ["actor", "reference"] (command line) has "reference"; its values can be "actor",'
        ' "critic".',
    ),
    (
        "--memory.offload_parameters critic,actor,critic",
        'memory.offload_parameters = ["critic", "actor", "critic"] (command line) has "critic" twice; give it once.',
    ),
    (
        "--memory.resume later",
        'memory.resume = "later" (command line) is not one of "staged", "all".',
    ),
    (
        "--run.phase_timeouts.sycn 60",
        "run.phase_timeouts.sycn = 60 cannot work: there is no such phase; the nearest is sync.",
    ),
    (
        "--run.phase_timeouts.sync soon",
        'run.phase_timeouts.sync = "soon" cannot work: it must be a number of seconds above 0.',
    ),
    (
        "--run.heartbeat_timeout 1",
        "run.heartbeat_timeout = 1.0 cannot work: hosts beat once a second; it must be at least 3.",
    ),
    (
        "--run.dir runs/12:30",
        'run.dir = "runs/12:30" cannot work: SGLang takes no colon in the name of a model\'s folder; leave it out.',
    ),
    (
        "missing.toml",
        "{dir}/missing.toml is not a file; give the path of a TOML file, such as configs/cpu/quickstart.toml.",
    ),
    (
        "broken.toml",
        "{dir}/broken.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 5).",
    ),
    (
        "reserved.toml",
        "engine.args.port = 1 cannot be set there: the harness derives it from engine.base_port.",
    ),
    ("--actor.lr 1e-5", "actor.lr (command line) is not a key; the nearest is actor.learning_rate."),
    ("--actor.tp 2", "actor.tp (command line) is not a key; the nearest is parallel.tp."),
    (
        "--actor.minibatch_size eight",
        'actor.minibatch_size = "eight" (command line) is a string; it must be an integer.',
    ),
    ("--run.steps 2.5", "run.steps = 2.5 (command line) is a number; it must be an integer."),
    ("--algorithm.advantage ppo", 'algorithm.advantage = "ppo" (command line) is not one of "gae", "grpo", "rloo".'),
    ("--model.dtype fp16", 'model.dtype = "fp16" (command line) is not one of "float32", "bfloat16".'),
    (
        "quickstart",
        '"quickstart" (command line) is neither a TOML file nor an option; write --section.key VALUE, or FILE.toml.',
    ),
    ("--run.steps", "--run.steps (command line) has no value; write --run.steps VALUE."),
    ("--run.steps --run.seed 1", "--run.steps (command line) has no value; write --run.steps VALUE."),
    ("--dry-rnu", "--dry_rnu (command line) is not an option; the nearest is --dry_run."),
    ("--json", "--json (command line) has nothing to print; add --dry-run."),
    ("--dry-run=yes", "--dry_run = 'yes' (command line) takes no value; write --dry_run alone."),
    ("--dry-run --nnodes two", "--nnodes = 'two' (command line) is not a count; write a whole number of at least 1."),
    (
        "--dry-run --nnodes 3",
        "--nnodes = 3 (command line) does not divide the mesh of 2 ranks; give --nproc_per_node.",
    ),
    (
        "--dry-run --nnodes 2 --cuda-visible-devices 0 --cuda-visible-devices 1 --cuda-visible-devices 2",
        "--cuda_visible_devices (command line) is given 3 times for --nnodes 2; give it once, or once a host.",
    ),
    ("--parallel.tp 0", "parallel.tp = 0 cannot work: it must be at least 1."),
    ("--run.steps 0", "run.steps = 0 cannot work: it must be at least 1."),
    (
        "--rollout.temperature 0",
        "rollout.temperature = 0.0 cannot work: it must be at least 1e-06; below it SGLang is greedy, and greedy responses teach nothing.",
    ),
    (
        "--rollout.temperature 1e-7",
        "rollout.temperature = 1e-07 cannot work: it must be at least 1e-06; below it SGLang is greedy, and greedy responses teach nothing.",
    ),
    (
        "--rollout.top_k 1 --rollout.temperature 0.7",
        "rollout.top_k = 1 cannot work: it must be -1 (all tokens) or at least 2; 1 is greedy: it teaches nothing, and"
        " SGLang's log-probs then leave the temperature out.",
    ),
    (
        "--engine.args.preferred_sampling_params min_p",
        'engine.args.preferred_sampling_params = "min_p" cannot work: SGLang adds them to each request, and penalties'
        " and biases in them change log-probs that the trainer computes without; set what [rollout] has, and leave it out.",
    ),
    (
        "--model.master_dtype bfloat16",
        'model.master_dtype = "bfloat16" cannot work: model.dtype = "float32" would compute with weights that are rounded'
        ' already; use "float32".',
    ),
    (
        "--algorithm.advantage rloo --rollout.responses_per_prompt 1",
        'rollout.responses_per_prompt = 1 cannot work: algorithm.advantage = "rloo" compares the responses of one prompt'
        " and needs at least 2.",
    ),
    ("--rollout.top_p 1.5", "rollout.top_p = 1.5 cannot work: it must be above 0 and at most 1."),
    (
        "--rollout.top_k 0",
        "rollout.top_k = 0 cannot work: it must be -1 (all tokens) or at least 2; 1 is greedy: it teaches nothing, and"
        " SGLang's log-probs then leave the temperature out.",
    ),
    (
        "--parallel.dp 3",
        "rollout.prompts_per_step = 8 cannot work: it must be a multiple of parallel.dp = 3.",
    ),
    (
        "--parallel.tp 3",
        "rollout.prompts_per_step = 8 cannot work: each engine's 16 responses must be a multiple of its parallel.tp x"
        " parallel.pp = 3 ranks.",
    ),
    ("--actor.minibatch_size 5", "actor.minibatch_size = 5 cannot work: it must be a multiple of the 2 ranks."),
    (
        "--actor.minibatch_size 6",
        "actor.minibatch_size = 6 cannot work: it must divide the step's 16 sequences (rollout.prompts_per_step x"
        " rollout.responses_per_prompt).",
    ),
    (
        "--algorithm.advantage grpo --rollout.responses_per_prompt 1",
        'rollout.responses_per_prompt = 1 cannot work: algorithm.advantage = "grpo" compares the responses of one prompt'
        " and needs at least 2.",
    ),
    ("--algorithm.lam 1.1", "algorithm.lam = 1.1 cannot work: it must be between 0 and 1."),
    (
        "--algorithm.kl_target 0.1 --algorithm.kl_placement loss",
        'algorithm.kl_target = 0.1 cannot work: only algorithm.kl_placement = "reward" adapts; set it, or'
        " algorithm.kl_target = 0.",
    ),
    ("--actor.dual_clip 0.5", "actor.dual_clip = 0.5 cannot work: it must be 0 (off) or above 1."),
    ("--task.template Answer:", 'task.template = "Answer:" cannot work: it must contain {{question}}.'),
    (
        "--engine.args.tp_size 4",
        "engine.args.tp_size = 4 cannot be set there: the harness derives it from parallel.tp.",
    ),
    (
        "--engine.implementation sglang --parallel.pp 2",
        'engine.implementation = "sglang" cannot work: sglang\'s own VerlEngine has no pipeline parallelism; use'
        ' parallel.pp = 1 or engine.implementation = "harness".',
    ),
    (
        "--model.name some/folder --model.overrides.num_hidden_layers 4",
        'model.overrides.num_hidden_layers has no use with model.name = "some/folder": only the tiny models (qwen2, qwen3,'
        " llama, qwen3_moe, deepseek_v3, moonlight) are made on the spot.",
    ),
    ("--weights.bucket_size_mib 0", "weights.bucket_size_mib = 0 cannot work: it must be at least 1."),
    (
        "--weights.tolerance_float32 1e-5",
        "weights.tolerance_float32 (command line) is not a key; the nearest is weights.transport.",
    ),
    (
        "--weights.transport distributed --engine.device cuda",
        'weights.transport = "distributed" cannot work: NCCL refuses two ranks on one GPU, and an engine rank is on its'
        " trainer rank's; use parallel.colocate = false, or another transport.",
    ),
    (
        "--weights.transport stream --engine.device cuda --parallel.colocate false",
        'weights.transport = "stream" cannot work: with parallel.colocate = false the engine does not see the'
        ' trainer\'s GPU, and opens no handle of its memory; use "distributed" or "disk".',
    ),
    (
        "--parallel.colocate false --engine.device cpu",
        "parallel.colocate = false cannot work: on the CPU there are no GPUs to separate; use true.",
    ),
    (
        "--parallel.colocate false --engine.implementation sglang",
        "parallel.colocate = false cannot work: sglang's own VerlEngine runs on its trainer's GPU; use true,"
        ' or engine.implementation = "harness".',
    ),
    (
        "--weights.transport disk --engine.implementation sglang",
        'weights.transport = "disk" cannot work: sglang\'s own VerlEngine takes named tensors only; use'
        ' weights.transport = "tensor".',
    ),
    (
        "--weights.transport distributed --parallel.pp 2",
        'weights.transport = "distributed" cannot work: sglang gives every pipeline stage the same ranks of an update'
        " group; use parallel.pp = 1 or another transport.",
    ),
    (
        "--memory.offload_optimizer ['critic'] --algorithm.advantage grpo",
        'memory.offload_optimizer = ["critic"] cannot work: algorithm.advantage = "grpo" has no critic; leave critic out.',
    ),
    (
        "--memory.offload_parameters ['actor','reference'] --algorithm.kl_placement none",
        'memory.offload_parameters = ["actor", "reference"] cannot work: algorithm.kl_placement = "none" has no'
        " reference; leave reference out.",
    ),
    (
        "--model.weights random --engine.initial_weights checkpoint",
        'engine.initial_weights = "checkpoint" cannot work: model.weights = "random" saves no checkpoint; use'
        ' engine.initial_weights = "dummy".',
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_each_mistake_has_its_sentence(arguments: str, sentence: str, folder: Path) -> None:
    words = [str(folder / word) if word.endswith(".toml") else word for word in arguments.split()]
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert str(caught.value) == sentence.format(dir=folder)


def test_a_mistake_exits_2_with_one_line_from_rank_0_only() -> None:
    speaking = run_script("launch/ppo.py", "--actor.lr", "1", RANK="0")
    silent = run_script("launch/ppo.py", "--actor.lr", "1", RANK="1")
    assert (speaking.returncode, silent.returncode) == (2, 2)
    assert speaking.stderr == "error: actor.lr (command line) is not a key; the nearest is actor.learning_rate.\n"
    assert (speaking.stdout, silent.stdout, silent.stderr) == ("", "", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--dry-run", "--nproc-per-node", "4"],
            "parallel.dp * parallel.tp * parallel.pp = 1 * 2 * 1 = 2, but the world size is 4: start 2 ranks (--nnodes"
            " times --nproc-per-node) or set parallel.dp = 2",
        ),
        (
            ["--dry-run", "--cuda-visible-devices", "0,1,0,1", "--parallel.tp", "4"],
            "CUDA_VISIBLE_DEVICES = '0,1,0,1' lists GPU 0 twice: list each GPU once",
        ),
        (
            ["--dry-run", "--cuda-visible-devices", ""],
            "rank 0 on host host0 has CUDA_VISIBLE_DEVICES='', which hides every GPU: unset it, or list the GPUs of this"
            " host's ranks",
        ),
        (
            ["--check", "--engine.base_port", "80"],
            "engine.base_port = 80 cannot work: it must be between 1024 and 60000.",
        ),
    ],
)
def test_what_cannot_be_placed_exits_2(words: list[str], sentence: str) -> None:
    done = run_script("launch/ppo.py", *words)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"error: {sentence}\n", "")


def test_without_torchrun_it_says_how_to_start() -> None:
    done = run_script("launch/ppo.py", "configs/cpu/quickstart.toml")
    assert done.returncode == 2
    command = "bin/torchrun --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml"
    assert done.stderr.startswith("error: RANK is not in the environment; start this with: ")
    assert done.stderr.endswith(f"{command}\n") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_names_the_new_one(old: str, new: str) -> None:
    section, name = old.split(".")
    with pytest.raises(ConfigError) as caught:
        build_config([Layer(source="old.toml", table={section: {name: {}}})])
    assert str(caught.value) == f"{old} (old.toml) was renamed: use {new}."
    assert new.split()[0] in all_keys()
    assert old not in all_keys()


def test_a_key_inside_a_renamed_table_names_the_new_table() -> None:
    with pytest.raises(ConfigError, match=r"run\.deadlines .*use run\.phase_timeouts"):
        parse(["--run.deadlines.sync", "60"])
