from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.rollout import sglang_api


def test_the_file_of_the_load_reports_loses_its_name_after_the_reader_has_opened_it(tmp_path: Path) -> None:
    file = tmp_path / "sglang_loads_test"
    file.write_bytes(b"reports")
    opened: list[bytes] = []
    reader = SimpleNamespace(path=str(file), read_all=lambda: opened.append(file.read_bytes()))
    sglang_api.unlink_shared_memory(SimpleNamespace(tokenizer_manager=SimpleNamespace(load_snapshot_reader=reader)))
    assert opened == [b"reports"] and not file.exists()


@pytest.mark.parametrize("manager", [SimpleNamespace(), SimpleNamespace(load_snapshot_reader=SimpleNamespace())])
def test_releases_without_a_file_of_load_reports_are_left_alone(manager: SimpleNamespace) -> None:
    sglang_api.unlink_shared_memory(SimpleNamespace(tokenizer_manager=manager))
