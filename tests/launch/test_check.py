"""--check, and what the quickstart and ranks look at before they start: every path, at once, and nothing is made."""

from dataclasses import fields
from pathlib import Path

import pytest

from harness.config.layers import ConfigError
from harness.config.schema import ENGINE_MODELS, Config, named_paths
from harness.tools import preflight
from harness.tools.command_line import parse
from launch import ppo
from tests.end_to_end.launching import QUICKSTART, run_script

SAVED = "step00000-rank0000.safetensors", "step00000-rank0001.safetensors"
PATHS = {
    "--run.dir {dir}/file": "run.dir",
    "--checkpoint.every 1 --checkpoint.folder {dir}/file": "checkpoint.folder",
    "--checkpoint.every 1 --checkpoint.folder {dir}/file/inner": "/file is a file",
    "--checkpoint.resume {dir}/none/step-2": "is not a checkpoint",
    "--weights.folder {dir}/file": "weights.folder",
    "--rollout.save {dir}/file": "rollout.save",
    "--rollout.save {dir}/saved": "holds rollouts of another run",
    "--rollout.load {dir}/none": 'none" does not exist',
    "--rollout.load {dir}/file": 'file" is a file',
    "--rollout.load {dir}/empty": "has no rollouts",
    "--rollout.load {dir}/saved": "has the rollouts of 1 steps, and run.steps = 3",
    "--rollout.load {dir}/saved --parallel.tp 4 --run.steps 1": "lacks rollouts that this run needs: step00000-rank0002",
    "--model.name {dir}/none": "is not a folder here",
    "--task.source {dir}/none.jsonl": "OWNER/NAME",
    "--task.source {dir}/file": "must be a .jsonl or .parquet file",
    "--validation.source {dir}/none.parquet": "OWNER/NAME",
    "--task.reward {dir}/none.py:f": "there is no file",
    "--engine.args.tokenizer_path {dir}/none": "engine.args.tokenizer_path",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    for name in ("empty", "saved"):
        (tmp_path / name).mkdir()
    for name in SAVED:
        (tmp_path / "saved" / name).touch()
    return tmp_path


@pytest.mark.parametrize("words", PATHS)
def test_a_path_that_cannot_be_used_is_told_by_check(
    words: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    asked = [QUICKSTART, *words.format(dir=folder).split(), "--check", "--engine.device", "cpu"]
    assert ppo.main(asked) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and PATHS[words] in line
    assert sorted(folder.rglob("*")) == before


def test_all_paths_are_told_together_with_all_else(folder: Path) -> None:
    words = f"--parallel.tp 3 --rollout.load {folder}/none --weights.folder {folder}/file"
    words += f" --task.reward {folder}/none.py:f --validation.source {folder}/a.jsonl,{folder}/b.jsonl"
    keys = ("task.reward", "rollout.load", "weights.folder", "rollout.prompts_per_step", "actor.minibatch_size")
    for script, options in (("launch/ppo.py", ["--check"]), ("launch/quickstart.py", [])):
        config = [QUICKSTART] if script == "launch/ppo.py" else []
        done = run_script(script, *config, *words.split(), *options, HARNESS_VENV="none")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert [key for key in keys if f"error: {key}" not in done.stderr] == []
        assert "a.jsonl" in done.stderr and "b.jsonl" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: 8 mistakes")


def test_ranks_look_for_what_their_own_host_must_have(folder: Path) -> None:
    words = f"--rollout.load {folder}/saved --run.steps 1 --parallel.tp 4 --weights.folder {folder}/file"
    config = parse([*words.split(), "--engine.device", "cpu"]).config
    mesh = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="^weights.folder"):  # its two ranks have what they need
        preflight.check_rank(config, "launch/ppo.py", [], {"RANK": "0"} | mesh)
    with pytest.raises(ConfigError, match="^rollout.load .* lacks .*rank0002"):  # and another host's disk is its own
        preflight.check_rank(config, "launch/ppo.py", [], {"RANK": "2"} | mesh)


def test_every_key_that_names_files_has_a_check() -> None:
    config = Config()
    for section in (getattr(config, each.name) for each in fields(config)):
        for each in fields(section):
            if each.metadata:
                setattr(section, each.name, ("x",) if isinstance(getattr(section, each.name), tuple) else "x")
    config.engine.args = dict.fromkeys(ENGINE_MODELS, "x")
    named = {key for use in ("read", "written") for key, _ in named_paths(config, use)}
    assert named == preflight.CHECKS.keys() and len(named) == 12
