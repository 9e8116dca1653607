"""Several mistakes of one config: all are told at once, causes first, and nothing that only follows from another."""

from pathlib import Path

import pytest

from harness.config.facts import Facts
from harness.config.layers import ConfigError
from harness.config.resolve import resolve
from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.command_line import parse, read_command

HEADS = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}


def told(*words: str, facts: Facts | None = None) -> list[str]:
    command = read_command(words)
    with pytest.raises((ConfigError, UnsupportedEnvironment)) as caught:
        resolve(command.config, facts or Facts(), reading=command.reading)
    return str(caught.value).splitlines()


def test_the_size_that_the_command_line_changed_comes_before_what_no_longer_divides() -> None:
    first, *others, last = told("--parallel.tp", "3", facts=Facts(device="cuda", model=HEADS))
    assert first.startswith("parallel.tp = 3 cannot work: the model's 8 attention heads cannot be divided by it")
    assert [each.partition(" ")[0] for each in others] == ["rollout.prompts_per_step", "actor.minibatch_size"]
    assert last.startswith("3 mistakes, and parallel.tp (command line) is in all of them")


def test_mistakes_of_the_words_are_told_with_those_of_the_values() -> None:
    words = "--actor.lr 1 --run.steps two --engine.base_port 80 --steps 3 --weights.transport x --run.seed"
    *lines, last = told(*words.split())
    for part in ("actor.lr", "run.steps", "engine.base_port", "--steps", "weights.transport", "--run.seed"):
        assert sum(part in line for line in lines) >= 1, part
    assert last.startswith("6 mistakes") and len(lines) == 6


def test_the_command_line_comes_before_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[run]\nseed = -1\n[actor]\nclip_low = 2.0\n")
    lines = told(str(tmp_path / "a.toml"), "--checkpoint.keep", "-1")
    assert [line.partition(" ")[0] for line in lines] == ["checkpoint.keep", "run.seed", "actor.clip_low", "3"]


@pytest.mark.parametrize(
    "words",
    [
        "--parallel.tp 0",  # which would divide by 0
        "--parallel.tp two --actor.minibatch_size 5",  # of how many ranks must it be a multiple?
        "--actor.minibatch_siz 6",  # the nearest key has its default, which was not meant
        "--rollout.prompts_per_step 9 --parallel.dp 2 --parallel.tp 1",  # how many sequences, only the mended one tells
        "--engine.args.mem_fraction_static high",
    ],
)
def test_what_only_follows_from_another_mistake_is_not_told(words: str) -> None:
    assert len(told(*words.split(), facts=Facts(device="cuda", model=HEADS))) == 1


def test_every_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text("[run")
    with pytest.raises(ConfigError) as caught:
        read_command([str(tmp_path / "a.toml"), str(tmp_path / "b.toml"), "--actor.lr", "1"])
    assert [part in str(caught.value) for part in ("a.toml is not a file", "b.toml is not valid TOML")] == [True, True]


def test_it_is_125_only_if_nothing_but_the_machine_is_in_the_way() -> None:
    facts = Facts(device="cpu", model={"model_type": "gpt_oss"})
    with pytest.raises(UnsupportedEnvironment):
        resolve(Config(), facts)
    with pytest.raises(ConfigError, match="minibatch_siz(.|\n)*gpt_oss"):
        resolve(parse([]).config, facts, reading=read_command(["--actor.minibatch_siz", "5"]).reading)
