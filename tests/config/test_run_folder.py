"""Run directories of processes that start at the same time in one working directory."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.layers import ConfigError
from harness.config.run_folder import check_run_folder, make_run_folder

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = 6
RUN = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from datetime import datetime
from harness.config.layers import ConfigError
from harness.config.run_folder import check_run_folder, make_run_folder
print("ready", flush=True)
sys.stdin.readline()
print(make_run_folder(sys.argv[1], datetime(2026, 11, 21)))
"""


def taken_at_once(folder: Path, given: str) -> list[str]:
    """What each of so many processes takes for its run's directory."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", RUN, given]
    runs = [subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True) for _ in range(RUNS)]
    for each in runs:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in runs:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return [each.communicate(timeout=60)[0].strip() for each in runs]


def test_runs_of_the_same_second_have_directories_of_their_own_closed_to_others(tmp_path: Path) -> None:
    taken = taken_at_once(tmp_path, "")
    start = str(tmp_path / "runs" / "20261121-000000")
    assert set(taken) == {start, *(f"{start}-{number}" for number in range(2, RUNS + 1))}
    assert {stat.S_IMODE(Path(each).stat().st_mode) for each in taken} == {0o700}


def test_of_runs_that_are_given_one_directory_one_has_it(tmp_path: Path) -> None:
    taken = taken_at_once(tmp_path, "mine")
    assert sorted(taken) == sorted([str(tmp_path / "mine"), *["None"] * (RUNS - 1)])
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


def test_folders_that_are_made_above_a_run_are_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_run_folder(str(tmp_path / "a" / "b" / "run"))
    finally:
        os.umask(before)
    assert made
    folders = (tmp_path / "a", tmp_path / "a" / "b", Path(made))
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}


@pytest.mark.parametrize("why", ["mode", "link"])
def test_a_directory_into_which_others_can_put_files_is_refused(why: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    if why == "mode":
        folder.chmod(0o755)
    else:
        (folder / "report.md").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="its mode is 755" if why == "mode" else "holds a link, report.md"):
        make_run_folder(str(folder))
    with pytest.raises(ConfigError, match="give another folder"):
        check_run_folder(str(folder))
    assert sorted(each.name for each in folder.iterdir()) == (["report.md"] if why == "link" else [])


def test_a_directory_with_a_config_holds_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert make_run_folder(str(tmp_path)) is None
