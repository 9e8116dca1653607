"""Mistakes that launch/sync.py must find before anything heavy is imported."""

import resource
import subprocess

import pytest

from tests.end_to_end.launching import run_script

CPU_SECONDS = 3.0


def launch(*words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Return what it did, and its seconds of CPU, which other work on the machine does not change much."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_script("launch/sync.py", *words, **environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--syncs", "0"], "--syncs = 0 and --repeats = 5 must each be at least 1."),
        (["--bench", "--repeats", "-1"], "--syncs = 3 and --repeats = -1 must each be at least 1."),
        (["--synks", "3"], "--synks (command line) is not an option; the nearest is --syncs."),
        (["--weights.bukket_size_mib", "1"], "weights.bukket_size_mib (command line) is not a key of this version; the nearest is weights.bucket_size_mib."),
        (["--weights.transport", "pigeon"], 'weights.transport (command line) must be one of "auto", "pull", "tensor", "bucket", "distributed", "disk", got "pigeon".'),
        (["nowhere.toml"], "nowhere.toml is not a file; give the path of a TOML file, such as configs/cpu/quickstart.toml."),
    ],
)  # fmt: skip
def test_a_mistake_exits_2_with_one_sentence_at_once(words: list[str], sentence: str) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {sentence}")
    assert seconds < CPU_SECONDS


def test_only_rank_0_says_it() -> None:
    done, _ = launch("--syncs", "0", RANK="1")
    assert (done.returncode, done.stderr, done.stdout) == (2, "", "")


@pytest.mark.parametrize("words", [["--syncs", "many"], ["--transports", "pigeon"], ["--repeats"]])
def test_a_value_of_the_wrong_kind_exits_2_and_names_the_option(words: list[str]) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert done.returncode == 2 and words[0] in done.stdout + done.stderr
    assert seconds < CPU_SECONDS


@pytest.mark.parametrize("words", [["--dry-run"], ["--check"], ["--dry-run", "--nnodes", "2"]], ids=" ".join)
def test_an_option_of_launch_ppo_is_refused(words: list[str]) -> None:
    done, seconds = launch("configs/cpu/quickstart.toml", *words)
    assert (done.returncode, done.stdout) == (2, "")
    said = "--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out."
    assert done.stderr == f"error: {said}\n"
    assert seconds < CPU_SECONDS
