"""verl's commands as harness configs: the seven of an SGLang guide, the keys of all releases, and the verdicts on the
rest."""

import json
import tomllib
from pathlib import Path

import pytest

from harness.config.layers import Layer, build_config
from harness.config.resolve import resolve
from harness.config.schema import Config
from harness.tools.preflight import check_plan
from harness.tools.verl.draft import row_of
from harness.tools.verl.overrides import RELEASES, Trainer, defaults, parse_override
from harness.tools.verl.plain_script import words_of_script
from harness.tools.verl.translate import Translation, translate

COMMANDS = sorted(Path(__file__).with_name("commands").glob("*.sh"))
ENVIRONMENT = {"HOME": "/h"}
NEEDED = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.actor.use_dynamic_bsz=True")


def of_script(path: Path, release: str = "auto", tiny: str = "") -> Translation:
    return translate(words_of_script(path.read_text(), [], ENVIRONMENT), release, tiny, ENVIRONMENT)


def of(*words: str, release: str = "auto") -> Translation:
    return translate((*NEEDED, *words), release, environment=ENVIRONMENT)


def loaded(found: Translation) -> Config:
    return build_config([Layer("test", tomllib.loads(found.toml))])


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_each_command_translates_with_nothing_unexplained(path: Path) -> None:
    found = of_script(path)
    words = words_of_script(path.read_text(), [], ENVIRONMENT)
    keys = {parse_override(word).key for word in words}
    assert {parse_override(each.override).key for each in found.verdicts} == keys
    assert found.is_whole and all(each.text for each in found.verdicts)
    assert loaded(found) == found.config
    resolve(found.config)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_tiny_keeps_the_parallel_sizes_and_can_run(path: Path) -> None:
    whole, found = of_script(path), of_script(path, tiny="auto")
    assert found.config.parallel == whole.config.parallel
    assert found.config.model.name == ("llama" if "llama" in path.stem else "qwen2")
    assert found.config.rollout.prompts_per_step <= 64 and found.config.run.steps == 3
    check_plan(loaded(found))


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
    assert config.model.packed == (RELEASES.index(release) >= 6)
    assert config.parallel.tp == 2 and config.parallel.dp == 4


GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.use_kl_loss=True")


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
