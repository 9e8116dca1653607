"""The versions and the command in environment.json."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from harness.tools.environment_file import package_versions

REPOSITORY = Path(__file__).parents[2]


def test_versions_of_what_is_not_installed() -> None:
    found = package_versions()
    assert found["torch"] == metadata.version("torch")
    assert all(version for version in found.values())


def test_the_command_is_torchruns_or_the_ranks_own_without_secrets(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    code = f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\nfrom harness.tools.environment_file import command\n"
    script.write_text(f"{code}print('>', command(), flush=True)\n")
    own = [sys.executable, str(script), "--x", "a b", "--token=hf_abcdefghijklmnopqrstuvwxyz"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *own[1:]]
    for command in (own, torchrun):
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        shown = said.partition("> ")[2].strip()
        assert shown.startswith(" ".join(command[:-2])) and "'a b'" in shown and "hf_" not in shown, shown
