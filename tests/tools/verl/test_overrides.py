"""Hydra's grammar, verl's keys by release, and which release a command is of."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from harness.config.layers import ConfigError
from harness.tools.verl.overrides import (
    RELEASES,
    VerlConfig,
    defaults,
    flatten,
    is_known,
    nearest_key,
    newest_release,
    parse_override,
    parse_value,
)


@pytest.fixture(autouse=True)
def _seconds() -> Iterator[None]:
    """End a test that reads one word for ten seconds: a loop over it has no end then, and may fill the memory."""

    def end(signum: int, frame: object) -> None:
        raise TimeoutError("the word is still being read")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("True", True),
        ("false", False),
        ("1024", 1024),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("-1", -1),
        ("'1024'", "1024"),
        ("", ""),
        ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B"),
        ("0.4.3.post2", "0.4.3.post2"),
        ("1_024", 1024),
        ("2024_", "2024_"),
        ("['a', \"b, c\", 3, null]", ["a", "b, c", 3, None]),
        ("[]", []),
        (r"{a.\{*\}: {}, b\:c: 1}", {"a.{*}": {}, "b:c": 1}),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("${data.max_prompt_length}", "${data.max_prompt_length}"),
        ("${oc.env:HOME}/data", "${oc.env:HOME}/data"),
        ("[hdfs://a/b.parquet, ${x}/c]", ["hdfs://a/b.parquet", "${x}/c"]),
    ],
)
def test_values(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "word",
    [
        "a=1,2",
        "a=[1,2",
        "a='x",
        "a=b}",
        "a=[b}",
        "a=[b\\",
        'a=["b"}]',
        "a={b: [1}",
        "a={b: 1",
        "a=" + 3000 * "[",
        "a=[b:c]",
    ],
)
def test_what_hydra_would_not_read(word: str) -> None:
    with pytest.raises(ConfigError, match="is no value that hydra reads, or several"):
        parse_override(word)
    with pytest.raises(ConfigError, match="is not a hydra override"):
        parse_override("data.x")


@pytest.mark.parametrize(("start", "again"), [("'", r"\a"), ('"', r"\\"), ("{b", " "), ("[", "${")])
def test_the_time_to_refuse_a_value_grows_with_its_length_alone(start: str, again: str) -> None:
    """Where it grows with the square, or worse, this takes from a minute to centuries."""
    with pytest.raises(ConfigError):
        parse_value(f"{start}{again * 50_000}]")


def test_marks_and_tables() -> None:
    overrides = [
        parse_override(word) for word in ("a.b=1", "+a.c=2", "++a.d=3", "~a.e", "a.f={g: 4, h: {i: 5}}", "a.b=6")
    ]
    assert [each.mark for each in overrides] == ["", "+", "++", "~", "", ""]
    assert {key: each.value for key, each in flatten(overrides).items()} == {
        "a.b": 6,
        "a.c": 2,
        "a.d": 3,
        "a.e": None,
        "a.f.g": 4,
        "a.f.h.i": 5,
    }


def config(release: str, *words: str) -> VerlConfig:
    return VerlConfig(release=release, trainer="fsdp", given=flatten([parse_override(word) for word in words]))


def test_defaults_of_each_release() -> None:
    by_release = {release: config(release) for release in RELEASES}
    entropy = {release: each.get("actor_rollout_ref.actor.entropy_coeff") for release, each in by_release.items()}
    assert entropy["0.2"] == entropy["0.3"] == 0.001 and {entropy[each] for each in RELEASES[2:]} == {0}
    padding = [each.get("actor_rollout_ref.model.use_remove_padding") for each in by_release.values()]
    assert padding == [False] * 6 + [True] * 3
    assert "algorithm.use_kl_in_reward" not in defaults("0.3", "fsdp") and "critic.fsdp.param_offload" in defaults(
        "0.9", "fsdp"
    )
    assert "critic.model.fsdp_config.param_offload" not in defaults("0.9", "fsdp")
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size" in defaults("0.6", "megatron")


def test_references_follow_overrides_then_defaults() -> None:
    for release in RELEASES:
        found = config(release, "actor_rollout_ref.actor.ppo_mini_batch_size=64", "data.max_prompt_length=7")
        assert found.get("critic.ppo_mini_batch_size") == 64 and found.get("critic.ppo_epochs") == 1
        assert found.get("actor_rollout_ref.rollout.prompt_length") == 7
        assert found.get("actor_rollout_ref.rollout.response_length") == 512
    own = config("0.9", "trainer.project_name=p", "x.y=${trainer.project_name}/${oc.select:no.where,z}")
    assert own.get("x.y") == "p/z" and own.get("trainer.default_local_dir") == "checkpoints/p/gsm8k"


def test_references_that_multiply_are_refused() -> None:
    found = config("0.9", "x.a=" + 12 * "${x.b}", "x.b=" + 12 * "${x.a}", "x.c=${x.c}")
    with pytest.raises(ConfigError, match=r"x\.a has references to references"):
        found.get("x.a")
    assert found.get("x.c") == "${x.c}"


def test_the_newest_release_that_takes_a_command() -> None:
    def newest(*words: str) -> tuple[str, list[str]]:
        given = [parse_override(word) for word in ("actor_rollout_ref.rollout.name=sglang", *words)]
        return newest_release(given, "fsdp")

    assert newest("data.train_batch_size=1") == ("0.9", [])
    assert newest("+trainer.val_before_train=False") == ("0.3", [])  # 0.4 has the key; hydra refuses the plus
    assert newest("critic.model.fsdp_config.param_offload=True") == ("0.7", [])
    assert newest("actor_rollout_ref.actor.fsdp_config.grad_offload=True") == ("0.2", [])
    both, why = newest("+trainer.val_before_train=False", "critic.fsdp.param_offload=True")
    assert both == "0.9" and len(why) == 1
    assert newest_release([parse_override("data.train_batch_size=1")], "fsdp")[0] == "0.5"  # rollout.name had a default


def test_unknown_keys_have_a_nearest_one() -> None:
    assert not is_known("actor_rollout_ref.rollout.temprature")
    assert nearest_key("actor_rollout_ref.rollout.temprature") == "actor_rollout_ref.rollout.temperature"
    assert nearest_key("actor.clip_ratio_low") == "actor_rollout_ref.actor.clip_ratio_low"
    assert is_known("actor_rollout_ref.rollout.temperature") and is_known("data")
