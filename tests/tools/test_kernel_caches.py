"""Where compiled kernels are kept, in real folders."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from harness.tools import kernel_caches


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    folder.mkdir(0o700)
    return folder


def test_every_cache_is_in_the_environment_in_a_folder_named_by_versions(prefix: Path) -> None:
    found = kernel_caches.variables({}, str(prefix))
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "CUDA_CACHE_PATH"} <= found.keys()
    folders = {Path(folder).parent for folder in found.values()}
    [folder] = folders
    assert folder.parent == prefix / "kernels"
    assert f"torch-{metadata.version('torch')}" in folder.name.split("_")
    assert list(prefix.iterdir()) == []  # nothing is made before something is compiled


def test_a_users_own_variables_win(prefix: Path) -> None:
    found = kernel_caches.variables({"TRITON_CACHE_DIR": "/elsewhere", "CUDA_CACHE_PATH": ""}, str(prefix))
    assert not {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"} & found.keys() and "TORCHINDUCTOR_CACHE_DIR" in found


def test_a_systems_python_keeps_nothing() -> None:
    assert kernel_caches.variables({}, sys.base_prefix) == {}


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("which", ["", "kernels", "kernels/versions"])
def test_nothing_is_kept_in_a_folder_that_others_can_write_to(prefix: Path, which: str, mode: int) -> None:
    versions = Path(kernel_caches.variables({}, str(prefix))["TRITON_CACHE_DIR"]).parent
    folder = prefix / which.replace("versions", versions.name)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    assert kernel_caches.variables({}, str(prefix)) == {}
    folder.chmod(0o755)
    assert kernel_caches.variables({}, str(prefix))


@pytest.mark.parametrize("which", ["", "kernels"])
def test_nothing_is_kept_behind_a_link(prefix: Path, tmp_path: Path, which: str) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    link = prefix / which if which else tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert kernel_caches.variables({}, str(prefix if which else link)) == {}


def test_nothing_is_kept_where_there_is_no_folder(tmp_path: Path) -> None:
    assert kernel_caches.variables({}, str(tmp_path / "absent")) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_nothing_is_kept_in_a_folder_that_is_read_only(prefix: Path) -> None:
    prefix.chmod(0o500)
    assert kernel_caches.variables({}, str(prefix)) == {}
