"""verl's commands as harness configs: the seven of an SGLang guide, the keys of all releases, and the verdicts on the
rest."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness.config.layers import ConfigError, Layer, build_config
from harness.config.resolve import resolve
from harness.config.schema import Config
from harness.tools.environments import REPOSITORY
from harness.tools.preflight import check_plan
from harness.tools.verl.draft import row_of
from harness.tools.verl.overrides import RELEASES, Trainer, defaults, parse_override
from harness.tools.verl.plain_script import words_of_script
from harness.tools.verl.translate import Translation, launch_lines, translate

KEYS = REPOSITORY / "harness" / "tools" / "verl" / "keys.toml"
COMMANDS = sorted(Path(__file__).with_name("commands").glob("*.sh"))
ENVIRONMENT = {"HOME": "/h"}
NEEDED = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.actor.use_dynamic_bsz=True")

SEVEN: dict[str, dict[str, Any]] = {
    "dev-release-tp2": {
        "release": "0.3",
        "parallel": (2, 2),
        "rollout.prompts_per_step": 64,
        "rollout.max_response_tokens": 1,
        "actor.minibatch_size": 64,
        "actor.microbatch_size": 16,
        "model.packed": True,
        "engine.args.mem_fraction_static": 0.4,
        "algorithm.kl_placement": "reward",
        "algorithm.kl_coefficient": 0.001,
        "actor.entropy_coefficient": 0.001,
        "task.long_prompts": "error",
        "validation.every": 10,
        "validation.before_train": False,
        "run.epochs": 2,
        "memory.resume": "all",
    },
    "memory-saver-tp4": {
        "release": "0.3",
        "parallel": (1, 4),
        "run.epochs": 1,
        "validation.before_train": True,
        "memory.offload_parameters": ("actor", "critic", "reference"),
        "memory.offload_optimizer": ("actor", "critic"),
    },
    "sequence-balance-comparison": {
        "release": "0.3",
        "parallel": (4, 2),
        "rollout.prompts_per_step": 2048,
        "actor.minibatch_size": 512,
        "actor.tokens_per_microbatch": 24000,
        "task.source": ("/h/data/gsm8k/train.parquet", "/h/data/math/train.parquet"),
        "trackers.names": ("wandb",),
        "trackers.project": "verl_example_gsm8k",
        "engine.args.mem_fraction_static": 0.2,
        "run.epochs": 15,
    },
    "single-host-tp2": {
        "release": "0.7",
        "parallel": (2, 2),
        "rollout.prompts_per_step": 4096,
        "actor.minibatch_size": 64,
        "actor.microbatch_size": 4,
        "algorithm.kl_placement": "none",
        "actor.entropy_coefficient": 0.0,
        "memory.resume": "staged",
        "engine.args.max_running_requests": 1024,
    },
    "two-hosts-dp1-tp4": {
        "release": "0.7",
        "parallel": (1, 4),
        "task.max_prompt_tokens": 1024,
        "task.long_prompts": "filter",
        "actor.minibatch_size": 256,
        "actor.microbatch_size": 8,
        "validation.before_train": True,
    },
    "two-hosts-dp2-tp2": {
        "release": "0.7",
        "parallel": (2, 2),
        "actor.learning_rate": 1e-6,
        "critic.learning_rate": 1e-5,
    },
    "two-hosts-tp16-llama": {
        "release": "0.7",
        "parallel": (1, 16),
        "model.name": "meta-llama/Llama-3.1-8B-Instruct",
        "actor.microbatch_size": 16,
        "engine.args.mem_fraction_static": 0.8,
    },
}
"""Name of the command -> what its config must have."""


def of_script(path: Path, release: str = "auto", tiny: str = "") -> Translation:
    return translate(words_of_script(path.read_text(), [], ENVIRONMENT), release, tiny, ENVIRONMENT)


def of(*words: str, release: str = "auto", needed: tuple[str, ...] = NEEDED) -> Translation:
    return translate((*needed, *words), release, environment=ENVIRONMENT)


def is_whole(*words: str) -> bool:
    return of(*words).is_whole


def value(config: Config, key: str) -> Any:
    section, name, *inner = key.split(".", 2)
    found = getattr(getattr(config, section), name)
    return found[inner[0]] if inner else found


def loaded(found: Translation) -> Config:
    return build_config([Layer("test", tomllib.loads(found.toml))])


def test_there_are_seven() -> None:
    assert [path.stem for path in COMMANDS] == sorted(SEVEN)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_each_command_translates_with_nothing_unexplained(path: Path) -> None:
    wanted = dict(SEVEN[path.stem])
    assert of_script(path).release == wanted["release"]
    found = of_script(path, wanted.pop("release"))
    assert found.is_whole
    words = words_of_script(path.read_text(), [], ENVIRONMENT)
    keys = {parse_override(word).key for word in words}
    assert {parse_override(each.override).key for each in found.verdicts} == keys
    assert all(each.text for each in found.verdicts)
    config = loaded(found)
    assert config == found.config
    resolve(config)
    assert (config.parallel.dp, config.parallel.tp) == wanted.pop("parallel")
    assert {key: value(config, key) for key in wanted} == wanted
    assert config.engine.preset == "sglang" and config.task.reward == "data_source"
    assert (config.model.dtype, config.model.master_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_tiny_keeps_the_parallel_sizes_and_can_run(path: Path) -> None:
    whole, found = of_script(path), of_script(path, tiny="auto")
    assert found.config.parallel == whole.config.parallel
    assert found.config.model.name == ("llama" if "llama" in path.stem else "qwen2")
    assert found.config.rollout.prompts_per_step <= 64 and found.config.run.steps == 3
    check_plan(loaded(found))


def test_a_tiny_model_is_smaller_than_a_block_of_fp8() -> None:
    found = translate((*NEEDED, "actor_rollout_ref.rollout.quantization=fp8"), "auto", "qwen3", ENVIRONMENT)
    assert found.config.model.rollout_precision == "same" and 'rollout_precision = "same"  # --tiny' in found.toml
    check_plan(loaded(found))


def test_tiny_learns_within_its_three_steps() -> None:
    words = (
        "trainer.critic_warmup=20",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=50",
        "actor_rollout_ref.model.path=Qwen/Qwen2-7B",
    )
    config = translate((*NEEDED, *words), tiny="auto", environment=ENVIRONMENT).config
    assert (config.algorithm.critic_warmup, config.actor.warmup_steps, config.run.steps) == (1, 2, 3)


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_not_named_has_the_releases_default(release: str) -> None:
    found = of("data.train_batch_size=256", release=release)
    assert found.is_whole and of(*GRPO, release=release).is_whole
    config = found.config
    old = release in ("0.2", "0.3")
    assert config.rollout.prompts_per_step == 256 and config.rollout.max_response_tokens == 512
    assert (config.algorithm.lam, config.actor.learning_rate, config.critic.learning_rate) == (1.0, 1e-6, 1e-5)
    assert config.actor.weight_decay == 0.01
    assert config.algorithm.kl_placement == ("reward" if old else "none")
    assert config.actor.entropy_coefficient == (0.001 if old else 0.0)
    assert config.task.long_prompts == ("filter" if release == "0.2" else "error")
    assert config.memory.resume == ("all" if RELEASES.index(release) < RELEASES.index("0.6") else "staged")
    assert config.parallel.tp == 2 and config.parallel.dp == 4


GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.use_kl_loss=True")
MAPPED: list[tuple[str, dict[str, Any]]] = [
    (" ".join(GRPO), {"algorithm.advantage": "grpo", "rollout.responses_per_prompt": 5, "actor.minibatch_size": 1280}),
    (
        " ".join(GRPO),
        {"algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.001},
    ),
    (
        "algorithm.adv_estimator=rloo_vectorized actor_rollout_ref.rollout.n=4",
        {"algorithm.advantage": "rloo", "rollout.responses_per_prompt": 4},
    ),
    ("actor_rollout_ref.model.path=~/models/m", {"model.name": "/h/models/m"}),
    ("algorithm.norm_adv_by_std_in_grpo=False", {"algorithm.normalize_by_std": False}),
    (
        "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.2",
        {"algorithm.kl_placement": "reward", "algorithm.kl_coefficient": 0.2},
    ),
    (
        "actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_high=0.28",
        {"actor.clip_high": 0.28},
    ),
    (
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10 critic.optim.lr_warmup_steps=10 data.train_batch_size=1024",
        {"actor.schedule": "constant_with_warmup", "actor.warmup_steps": 40},
    ),
    (
        "trainer.critic_warmup=7 trainer.total_training_steps=20",
        {"algorithm.critic_warmup": 6, "run.steps": 20, "run.epochs": 0},
    ),
    ("trainer.critic_warmup=1", {"algorithm.critic_warmup": 0}),
    (
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps_ratio=0.1"
        " trainer.total_training_steps=25 data.train_batch_size=1024",
        {"actor.warmup_steps": 8, "actor.schedule": "constant_with_warmup"},
    ),
    ("trainer.test_freq=5", {"validation.every": 5, "validation.before_train": True, "validation.rows": 0}),
    ("data.val_files=/v.parquet", {"validation.source": ("/v.parquet",), "validation.every": 0}),
    ("data.val_files=/v.parquet trainer.val_before_train=False", {"validation.source": ()}),
    (
        "+actor_rollout_ref.rollout.stop=END +actor_rollout_ref.rollout.stop_token_ids=[7,8]",
        {"rollout.stop": ("END",), "rollout.stop_token_ids": (7, 8)},
    ),
    (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=600 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        {"actor.tokens_per_microbatch": 1024},
    ),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=600", {"actor.tokens_per_microbatch": 600}),
    (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512 actor_rollout_ref.actor.veomni.ulysses_parallel_size=2",
        {"actor.tokens_per_microbatch": 1024},
    ),
    ("actor_rollout_ref.model.use_remove_padding=False", {"model.packed": False}),
    ("trainer.logger=[console,wandb,tensorboard]", {"trackers.names": ("tensorboard", "wandb")}),
    (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
        {"validation.temperature": 0.6},
    ),
    ("actor_rollout_ref.rollout.val_kwargs.temperature=0.6", {"validation.temperature": 0.6}),
    ("actor_rollout_ref.rollout.val_kwargs.top_p=0.7", {"validation.temperature": 0.0}),
    ("data.train_max_samples=100", {"task.rows": 100, "task.rows_seed": 0}),
    ("data.val_max_samples=100", {"validation.rows": 100, "validation.rows_seed": 0, "task.rows": 0}),
    (
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton",
        {"engine.args.attention_backend": "triton"},
    ),
    ("actor_rollout_ref.rollout.expert_parallel_size=2", {"engine.args.ep_size": 2}),
    ("actor_rollout_ref.rollout.enforce_eager=True", {"engine.args.disable_cuda_graph": True}),
    ("actor_rollout_ref.rollout.load_format=safetensors", {"engine.initial_weights": "checkpoint"}),
    (
        "actor_rollout_ref.rollout.quantization=fp8",
        {"model.rollout_precision": "fp8_block", "engine.initial_weights": "checkpoint"},
    ),
    ("actor_rollout_ref.rollout.quantization=null", {"model.rollout_precision": "same"}),
    (
        "actor_rollout_ref.rollout.dtype=float16 actor_rollout_ref.actor.fsdp_config.dtype=float16",
        {"model.dtype": "float16", "model.master_dtype": "float32"},
    ),
    ("actor_rollout_ref.rollout.dtype=half", {"model.dtype": "float16"}),
    ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", {"model.master_dtype": "bfloat16"}),
    ("custom_reward_function.path=~/r.py custom_reward_function.name=score", {"task.reward": "/h/r.py:score"}),
    (
        "trainer.save_freq=20 trainer.max_actor_ckpt_to_keep=2",
        {"checkpoint.every": 20, "checkpoint.keep": 2, "checkpoint.resume": "latest"},
    ),
    (
        "trainer.save_freq=20 trainer.resume_mode=disable",
        {"checkpoint.folder": "checkpoints/verl_examples/gsm8k", "checkpoint.resume": ""},
    ),
    ("trainer.save_freq=20 trainer.default_local_dir=", {"checkpoint.folder": ".", "checkpoint.resume": "latest"}),
    ("critic.fsdp.param_offload=True", {"memory.offload_parameters": ("critic",)}),
]


@pytest.mark.parametrize(("words", "wanted"), MAPPED, ids=lambda each: each if isinstance(each, str) else "")
def test_keys_have_their_counterparts(words: str, wanted: dict[str, Any]) -> None:
    found = of(*words.split())
    assert {key: value(found.config, key) for key in wanted} == wanted
    assert not found.of("unsupported") and not found.of("unknown")


SAID: list[tuple[str, str, str]] = [
    ("actor_rollout_ref.rollout.temprature=1", "unknown", "actor_rollout_ref.rollout.temperature"),
    ("ray_init.num_cpus=4", "irrelevant", "Ray"),
    ("+actor_rollout_ref.rollout.repetition_penalty=1.0", "irrelevant", "changes nothing"),
    ("+actor_rollout_ref.rollout.repetition_penalty=1.1", "unsupported", "penalty"),
    ("+actor_rollout_ref.rollout.engine_kwargs.sglang.json_model_override_args={a:1}", "unsupported", "JSON"),
    ("+actor_rollout_ref.rollout.frequency_penalty=0", "irrelevant", "changes nothing"),
    ("critic.enable=False", "unsupported", "GAE without a critic"),
    ("++data.apply_chat_template_kwargs.enable_thinking=False", "unsupported", "chat template"),
    ("algorithm.adv_estimator=remax", "unsupported", "remax"),
    ("reward_model.micro_batch_size=4", "irrelevant", "no reward model"),
    ("actor_rollout_ref.model.lora_rank=32", "unsupported", "LoRA"),
    ("actor_rollout_ref.model.lora_rank=0", "irrelevant", "LoRA"),
    ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "unsupported", "float16"),
    ("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "irrelevant", "model.dtype"),
    ("actor_rollout_ref.actor.fsdp_config.model_dtype=float16", "unsupported", "float16"),
    ("actor_rollout_ref.actor.megatron.dtype=float16", "unsupported", "float16"),
    ("+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32", "unsupported", "fp32"),
    ("actor_rollout_ref.rollout.max_model_len=1024", "unsupported", "1024 tokens"),
    ("actor_rollout_ref.rollout.max_model_len=1025", "irrelevant", "long enough"),
    ("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent", "irrelevant", "changes nothing"),
    ("critic.cliprange_value=0", "unsupported", "clamped"),
    ("actor_rollout_ref.rollout.prompt_length=256", "unsupported", "cut to 256"),
    ("actor_rollout_ref.actor.checkpoint.load_contents=[model]", "unsupported", "without the optimizer"),
    ("actor_rollout_ref.actor.clip_ratio=0.1", "irrelevant", "clip_ratio_low"),
    ("algorithm.kl_ctrl.kl_coef=0.1", "irrelevant", "no KL"),
    ("+actor_rollout_ref.rollout.engine_kwargs.sglang.tp_size=4", "unsupported", "parallel.tp"),
    ("~data.val_batch_size", "unsupported", "deleted"),
    ("critic.optim.min_lr_ratio=0.1", "irrelevant", "constant"),
    ("trainer.resume_from_path=/c", "irrelevant", "auto"),
    ("trainer.resume_mode=resume_path", "unsupported", "cannot read"),
    ("trainer.logger=[console,swanlab]", "unsupported", "swanlab"),
    ("data.truncation=left", "unsupported", "cut"),
    ("reward_model.reward_manager=dapo", "irrelevant", "no penalty"),
    ("critic.optim.weight_decay=0.1", "unsupported", "0.1 as actor.weight_decay; here actor and critic have 0.01"),
    ("actor_rollout_ref.actor.optim.weight_decay=0.1", "unsupported", "critic has 0.01"),
    ("critic.ppo_mini_batch_size=128", "unsupported", "here actor and critic have 256"),
    ("critic.ppo_epochs=1", "irrelevant", "for actor and critic"),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "unsupported", "give trainer.total_training_steps"),
    ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "irrelevant", "only choice"),
    ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "unsupported", "token-mean"),
    ("critic.loss_agg_mode=seq-mean-token-sum", "unsupported", "token-mean"),
    ("actor_rollout_ref.actor.clip_ratio_c=3", "irrelevant", "only choice"),
    ("actor_rollout_ref.actor.clip_ratio_c=10.0", "unsupported", "here it is 3"),
    ("+actor_rollout_ref.actor.tis_imp_ratio_cap=-1", "irrelevant", "changes nothing"),
    ("algorithm.rollout_correction.rollout_is_threshold=3", "irrelevant", "rollout_is is off"),
]


@pytest.mark.parametrize(("word", "fate", "reason"), SAID, ids=[word for word, _, _ in SAID])
def test_what_has_no_counterpart_is_said(word: str, fate: str, reason: str) -> None:
    found = of(word)
    [verdict] = [each for each in found.verdicts if each.override == word]
    assert verdict.fate == fate and reason in verdict.text
    assert (f"{fate}: {word}: {verdict.text}" in found.toml) and is_whole(word) == (fate == "irrelevant")


@pytest.mark.parametrize(
    ("release", "words", "temperature"),
    [
        ("0.3", "", 0.0),
        ("0.6", "", 0.0),
        ("0.6", "actor_rollout_ref.rollout.mode=async", 0.6),
        ("0.6", "actor_rollout_ref.rollout.val_kwargs.do_sample=True", 0.6),
        ("0.7", "actor_rollout_ref.rollout.val_kwargs.do_sample=False", 0.6),
    ],
)
def test_the_agent_loop_does_not_read_do_sample(release: str, words: str, temperature: float) -> None:
    found = of("actor_rollout_ref.rollout.val_kwargs.temperature=0.6", *words.split(), release=release)
    assert found.config.validation.temperature == temperature


@pytest.mark.parametrize(
    ("release", "words", "norm"),
    [
        ("0.7", "", 0.5),
        ("0.7", "trainer.use_legacy_worker_impl=disable", 2.0),
        ("0.5", "trainer.use_legacy_worker_impl=disable", 0.5),
        ("0.8", "", 2.0),
        ("0.9", "", 2.0),
    ],
)
def test_verls_engine_clips_gradients_by_its_own_key(release: str, words: str, norm: float) -> None:
    both = [
        f"{prefix}.{key}"
        for prefix in ("actor_rollout_ref.actor", "critic")
        for key in ("grad_clip=0.5", "optim.clip_grad=2.0")
    ]
    found = of(*both, *words.split(), release=release)
    assert found.config.actor.max_grad_norm == norm
    unread = "grad_clip=0.5" if norm == 2.0 else "clip_grad=2.0"
    fates = {each.override: each.fate for each in found.verdicts if "clip" in each.override}
    assert {fate for override, fate in fates.items() if override.endswith(unread)} <= {"irrelevant", "unsupported"}


def test_rows_are_drawn_as_verl_draws_them() -> None:
    found = of("data.train_max_samples=100", "data.seed=7")
    assert (found.config.task.rows, found.config.task.rows_seed) == (100, 7)
    assert [each.override for each in found.of("unsupported")] == ["data.seed=7"]  # the order of the prompts
    assert of("data.train_max_samples=100", "data.shuffle=False").config.task.rows_seed == -1


def test_without_a_release_the_newest_that_has_the_keys_counts_and_is_named() -> None:
    words = (*GRPO, "actor_rollout_ref.rollout.name=sglang", "critic.model.fsdp_config.param_offload=False")
    found = of(*words, needed=NEEDED[1:])
    assert found.release == "0.7" and found.is_whole
    assert "verl 0.7 (the newest release that has its keys)" in found.toml
    mixed = of("+trainer.val_before_train=False", "critic.fsdp.param_offload=True")
    assert mixed.release == "0.9" and "hydra refuses the plus" in mixed.toml


def test_a_penalty_for_long_responses_is_said() -> None:
    words = ("reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg={enable: True, len: 8}")
    assert [each.override for each in of(*words).of("unsupported")] == list(words)
    assert is_whole(*words[:1], words[1].replace("True", "False"))


@pytest.mark.parametrize(
    ("word", "placed"),
    [
        ("algorithm.kl_penalty=kl", "algorithm.use_kl_in_reward=True"),
        ("algorithm.kl_penalty=mse", "algorithm.use_kl_in_reward=True"),
        ("actor_rollout_ref.actor.kl_loss_type=k3", "actor_rollout_ref.actor.use_kl_loss=True"),
        ("actor_rollout_ref.actor.kl_loss_type=k3+", "actor_rollout_ref.actor.use_kl_loss=True"),
    ],
)
def test_another_estimator_of_the_kl_is_said(word: str, placed: str) -> None:
    is_here = word.endswith(("=kl", "=k3"))
    assert [each.override for each in of(word, placed).of("unsupported")] == ([] if is_here else [word])
    assert is_whole(word)  # no KL, no estimator


@pytest.mark.parametrize(("release", "steps"), [("0.7", 0), ("0.8", 8)])
def test_no_warmup_steps_leave_the_ratio_since_0_8(release: str, steps: int) -> None:
    words = [f"actor_rollout_ref.actor.optim.{each}" for each in ("lr_warmup_steps=0", "lr_warmup_steps_ratio=0.1")]
    config = of(*words, "trainer.total_training_steps=20", "data.train_batch_size=1024", release=release).config
    assert config.actor.warmup_steps == steps


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_every_key_of_every_release_has_a_verdict_and_a_default_that_changes_nothing(trainer: Trainer) -> None:
    """Give each release's keys their own defaults: none may be unknown; what is unsupported would be so unsaid."""
    options = ("--config-name=ppo_megatron_trainer",) if trainer == "megatron" else ()
    for release in RELEASES:
        silent = of(*options, release=release)
        words = []
        for key, default in defaults(release, trainer).items():
            if isinstance(default, dict) or "${" in json.dumps(default) or default == "???":
                continue
            if (row_of(key) or {}).get("default_counts"):
                continue
            text = (
                "null" if default is None else json.dumps(default) if isinstance(default, list | str) else str(default)
            )
            words.append(f"{key}={text}")
        loud = translate((*options, *words, *NEEDED), release, environment=ENVIRONMENT)
        assert loud.config == silent.config, release
        assert not loud.of("unknown"), release
        extra = {each.override for each in loud.of("unsupported")} - {
            each.override for each in silent.of("unsupported")
        }
        assert not extra, (release, extra)


def test_pipeline_stages_may_span_hosts() -> None:
    word = "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"
    parallel = of(word, "trainer.n_gpus_per_node=2", "trainer.nnodes=2", release="0.6").config.parallel
    assert (parallel.rank_order, parallel.dp, parallel.pp) == ("dp,pp,tp", 1, 2)


def test_a_mode_that_was_removed_tells_an_older_release() -> None:
    words = (*NEEDED, "actor_rollout_ref.rollout.mode=sync")
    assert translate(words, "auto", "qwen2", ENVIRONMENT).release < "0.7"


def test_the_critics_minibatch_counts_prompts_since_0_4() -> None:
    word = "actor_rollout_ref.rollout.n=5"
    [verdict] = of(word, release="0.3").of("unsupported")
    assert verdict.override == word and "critic has 256 as actor.minibatch_size" in verdict.text
    assert of(word, release="0.4").is_whole


def test_megatron_is_one_sentence_and_its_tables_follow() -> None:
    found = of(
        "--config-path=config",
        "--config-name=ppo_megatron_trainer.yaml",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
    )
    assert [each.override for each in found.of("unsupported")] == ["--config-name=ppo_megatron_trainer"]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("actor_rollout_ref.model.path=${oc.env:HOME}/q", "only hydra resolves"),
        ("--config-name=mine", "config/mine.yaml, a config of yours"),
        ("--config-path=/etc/verl", "/etc/verl/ppo_trainer.yaml, a config of yours"),
    ],
)
def test_what_only_hydra_knows_is_asked_for_as_verl_prints_it(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        of(word)
    assert f"{shlex.quote(word)} --cfg job --resolve > job.yaml" in str(raised.value)


def test_a_reference_that_hydra_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="a key that verl's config does not have"):
        of("trainer.experiment_name=${foo.bar}_x")


@pytest.mark.parametrize(
    ("path", "tiny"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2"),
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
        ("deepseek-ai/deepseek-llm-7b-chat", "llama"),
        ("moonshotai/Moonlight-16B-A3B", "moonlight"),
        ("/models/Meta-Llama-3-8B", "llama"),
    ],
)
def test_the_tiny_model_is_of_the_paths_architecture(path: str, tiny: str) -> None:
    words = (*NEEDED, f"actor_rollout_ref.model.path={path}")
    assert translate(words, tiny="auto", environment=ENVIRONMENT).config.model.name == tiny


def test_an_architecture_without_a_tiny_model_is_asked_for() -> None:
    for path in ("google/gemma-2-2b-it", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen1.5-MoE-A2.7B"):
        command = (*NEEDED, f"actor_rollout_ref.model.path={path}")
        with pytest.raises(ConfigError, match="choose one by --tiny NAME"):
            translate(command, tiny="auto", environment=ENVIRONMENT)
        assert translate(command, tiny="llama", environment=ENVIRONMENT).config.model.name == "llama"


def test_commands_to_run_it() -> None:
    found = of_script(Path(__file__).with_name("commands") / "two-hosts-dp1-tp4.sh", tiny="auto")
    torchrun, dry, hosts = launch_lines(found, "run.toml", hosts=2)
    assert "--nnodes=2 --nproc-per-node=2" in torchrun and dry.endswith("--dry-run --nnodes 2")
    assert hosts == "python3 launch/hosts.py --hosts 2 --ranks-per-host 2 -- launch/ppo.py run.toml"
    with pytest.raises(ConfigError, match="--hosts must divide the 4 ranks"):
        launch_lines(found, "run.toml", hosts=3)
