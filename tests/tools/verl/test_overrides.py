"""Hydra's grammar, verl's keys by release, and which release a command is of."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from harness.config.layers import ConfigError
from harness.tools.verl.overrides import (
    RELEASES,
    VerlConfig,
    flatten,
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
