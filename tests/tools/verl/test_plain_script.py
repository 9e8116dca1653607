"""A script's command, read without a shell; what needs one is asked for as the config that verl prints."""

from pathlib import Path

import pytest

from harness.config.layers import ConfigError
from harness.tools.verl.plain_script import words_of_command, words_of_script

MAIN = "python3 -m verl.trainer.main_ppo"


def words(script: str, *arguments: str, **environment: str) -> list[str]:
    return words_of_script(script, arguments, {"HOME": "/h", **environment})


def test_variables_quotes_continuations_comments_and_arguments() -> None:
    script = f"""#!/usr/bin/env bash
set -xeuo pipefail
A=$HOME/x B='$HOME'   # a comment's quote
export LIST="['$A', '${{A}}']" MANY="one=1 two=2"
# {MAIN} is below
PYTHONUNBUFFERED=1 nohup {MAIN} \\
    data.train_files="$LIST" \\
    trainer.logger=['console','wandb'] \\
    cost="\\$5" b=$B \\
    '${{trainer.project_name}}=x' $MANY "$MANY" \\
    $@
"""
    assert words(script, "last=1", "more=a b") == [
        "data.train_files=['/h/x', '/h/x']",
        "trainer.logger=[console,wandb]",
        "cost=$5",
        "b=$HOME",
        "${trainer.project_name}=x",
        "one=1",
        "two=2",
        "one=1 two=2",
        "last=1",
        "more=a b",
    ]


def test_the_callers_environment_counts_and_the_scripts_own_lines_come_first() -> None:
    script = f"A=own\n{MAIN} a=$A tp=$TP"
    assert words(script, A="given", TP="4") == ["a=own", "tp=4"]
    assert words(script, "b=2", TP="4") == ["a=own", "tp=4", "b=2"]
    assert words(f"A=${{TP}}\n{MAIN} a=$A", TP="4") == ["a=4"]
    with pytest.raises(ConfigError, match=r"\$TP is not set; set it in the environment"):
        words(script)


def test_secrets_of_the_environment_stay_out() -> None:
    [key] = words(f"{MAIN} 'k='$WANDB_API_KEY", WANDB_API_KEY="0123456789abcdef")
    assert "0123" not in key and "redacted" in key


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("B=$(date +%F)\n", "B=$(date +%F)"),
        ("A=(a=1 b=2)", "(a=1 b=2)"),
        ("if [ $HOME = x ]; then A=1; fi", "; then A=1; fi"),
        ("for A in 1 2", "for A in 1 2"),
        ("source env.sh", "source env.sh"),
        ("A+=x", "A+=x"),
        ("cd /verl", "cd /verl"),
        ("A=1 make", "A=1 make"),
        ("A='1", "A='1"),
        (f"xargs {MAIN} < args.txt", "< args.txt"),
        (f"{MAIN} a=1 \\\n  # a note \\\n  b.c=2", "b.c=2"),
        (f"{MAIN} a=$1", "$1"),
    ],
)
def test_a_shell_is_not_played_but_asked_for_the_printed_config(lines: str, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        words_of_script(f"{lines}\n{MAIN} a=$B", ["b=1"], {"HOME": "/h"}, "my run.sh")
    said = str(raised.value)
    assert said.startswith("my run.sh: ") and f'"{what}' in said and "\n" not in said
    assert "& --cfg job --resolve#' 'my run.sh' | bash -s -- b=1 > job.yaml" in said


@pytest.mark.parametrize("value", ["$(date +%F)", "`date`", '"$(date)"', "$((1024 * 2))", "${B:-1}"])
def test_a_value_that_needs_a_shell_is_none_of_a_runs_name(value: str) -> None:
    script = f"export A={value}\n{MAIN} a=1 "
    assert words(script + "trainer.experiment_name=ppo-${A}") == ["a=1", "trainer.experiment_name=ppo-A"]
    with pytest.raises(ConfigError, match=r"needs a shell; let verl print its config"):
        words(script + "b=$A")


def test_nothing_is_executed(tmp_path: Path) -> None:
    out = tmp_path / "written"
    assert words(f"A=$(touch {out})\n{MAIN} a=1") == ["a=1"]
    for script in (f"touch {out}\n{MAIN} a=1", f"{MAIN} a=1 > {out}"):
        with pytest.raises(ConfigError):
            words(script)
    assert not out.exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("python3 -m verl.trainer.main_generation a=1", "another trainer"),
        (f"{MAIN} a=1\n{MAIN} a=2", "2 commands"),
        ("A=1", "0 commands"),
    ],
)
def test_a_script_has_one_command_of_verls_ppo(script: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        words(script)


def test_words_of_a_command_or_overrides_alone() -> None:
    given = ["nohup", "python3", "-u", "-m", "verl.trainer.main_ppo", "a=1", "+b=2"]
    assert words_of_command(given) == words_of_command(["a=1", "+b=2"]) == ["a=1", "+b=2"]
    for wrong in ([], ["python3", "train.py"]):
        with pytest.raises(ConfigError, match="no arguments of verl"):
            words_of_command(wrong)
