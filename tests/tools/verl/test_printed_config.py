"""The config that verl prints: the same run as its command, and nothing said of what has verl's default."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config.layers import ConfigError
from harness.tools.verl.overrides import RELEASES, Trainer, VerlConfig, defaults, flatten, parse_override
from harness.tools.verl.plain_script import words_of_script
from harness.tools.verl.printed_config import is_printed_config, values_of
from harness.tools.verl.translate import translate, translate_printed

COMMANDS = Path(__file__).with_name("commands")
ENVIRONMENT = {"HOME": "/h"}
NEEDED = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.actor.use_dynamic_bsz=True")
LEFT_OUT = {
    "actor_rollout_ref.actor._target_": "verl.workers.config.FSDPActorConfig",
    "actor_rollout_ref.actor.profiler.enable": False,
    "actor_rollout_ref.actor.profiler.tool_config.nsys.discrete": True,
    "actor_rollout_ref.actor.qat.enable": False,
    "actor_rollout_ref.actor.qat.mode": "w4a16",
    "actor_rollout_ref.actor.router_replay.mode": "disabled",
    "critic.model.lora.rank": 0,
    "critic.model.lora.alpha": 32,
    "distillation.enabled": False,
    "distillation.teacher_models.teacher_model.inference.name": "vllm",
    "transfer_queue.enable": False,
    "transfer_queue.backend.storage_backend": "SimpleStorage",
}
"""Keys that verl prints, and keys.toml leaves out, with verl's defaults."""


def printed(release: str, trainer: Trainer, *words: str, **others: Any) -> dict[str, Any]:
    """Return what verl would print, read back."""
    config = VerlConfig(release=release, trainer=trainer, given=flatten([parse_override(word) for word in words]))
    table: dict[str, Any] = {}
    values = {key: config.get(key) for key in (*defaults(release, trainer), *config.given)}
    values["reward_model.forward_max_token_len_per_gpu"] = values["critic.forward_max_token_len_per_gpu"] = 32768
    for key, value in (values | LEFT_OUT | others).items():
        *path, name = key.split(".")
        target = table
        for part in path:
            target = target.setdefault(part, {})
        target[name] = value
    return values_of("INFO 11-27 platform: cuda\nwarning: no apex\n" + yaml.safe_dump(table), "job.yaml")


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_printed_config_is_the_run_of_its_command(release: str, trainer: Trainer) -> None:
    words = (*NEEDED, "data.max_prompt_length=300", "algorithm.gamma=0.9", "trainer.default_hdfs_dir=/x")
    option = ("--config-name=ppo_megatron_trainer",) if trainer == "megatron" else ()
    command = translate((*option, *words), release, environment=ENVIRONMENT)
    found = translate_printed(printed(release, trainer, *words), environment=ENVIRONMENT)
    assert found.release == release and found.config == command.config
    assert [each.override for each in found.of("irrelevant")][-1:] == ['trainer.default_hdfs_dir="/x"']
    assert len(found.verdicts) <= len(words) + (trainer == "megatron")
    assert not found.of("unknown") and len(found.of("unsupported")) == (trainer == "megatron")


def test_verls_own_output_of_a_command() -> None:
    """Printed by verl 0.3."""
    name = "sequence-balance-comparison"
    text = (COMMANDS / f"{name}.yaml").read_text()
    assert is_printed_config(text) and not is_printed_config((COMMANDS / f"{name}.sh").read_text())
    found = translate_printed(values_of(text, name), environment=ENVIRONMENT)
    script = (COMMANDS / f"{name}.sh").read_text().replace('$(date +"%Y-%m-%d-%H-%M")', "2025-03-01-12-00")
    words = words_of_script(script, [], ENVIRONMENT)
    command = translate(words, "0.3", environment=ENVIRONMENT)
    assert found.is_whole and found.release == "0.3" and found.config == command.config
    assert found.toml.count("\n# irrelevant") < 8 and "156 keys that verl 0.3 printed" in found.toml


@pytest.mark.parametrize(
    ("key", "value", "fate"),
    [
        ("actor_rollout_ref.model.lora_rank", 32, "unsupported"),
        ("critic.optim.weight_decay", 0.1, "unsupported"),
        ("distillation.enabled", True, "unsupported"),
        ("actor_rollout_ref.actor.qat.enable", True, "unsupported"),
        ("algorithm.new_in_1_0", 0.5, "unknown"),
        ("algorithm.new_in_1_0", None, None),
        ("trainer.esi_redundant_time", 5, "irrelevant"),
        ("data.image_key", "images", None),
        ("data.image_key", "pictures", "unsupported"),
    ],
)
def test_what_acts_is_said_and_what_does_not_is_not(key: str, value: Any, fate: str | None) -> None:
    found = translate_printed(printed("0.9", "fsdp", *NEEDED, **{key: value}), environment=ENVIRONMENT)
    assert next((each.fate for each in found.verdicts if each.override.startswith(f"{key}=")), None) == fate
    assert found.is_whole == (fate in (None, "irrelevant"))


def test_the_release_may_be_given() -> None:
    found = translate_printed(printed("0.7", "fsdp", *NEEDED), "0.8", environment=ENVIRONMENT)
    assert found.release == "0.8" and "(as asked)" in found.toml


def test_another_text_is_refused() -> None:
    for text in ("actor_rollout_ref:\n  a: [1", "- a\n"):
        with pytest.raises(ConfigError, match="job.yaml is not the YAML that verl prints"):
            values_of(text, "job.yaml")
