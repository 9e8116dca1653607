"""run_in_scheduler, as SGLang calls it; real engines run it in tests/weights."""

from typing import Any

import pytest
import torch

from harness.rollout.schedulers import LOADER, run_in_scheduler


def test_the_name_says_which_function_runs_and_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("harness.rollout.pipeline_stages.answer", lambda *given: called.append(given))
    tensor = torch.zeros(1)
    run_in_scheduler("model", [("harness.rollout.pipeline_stages.answer a message", tensor)])
    assert called == [("model", [("a message", tensor)])]


@pytest.mark.parametrize("path", ["os.system", "harnesses.x"])
def test_no_function_from_elsewhere_runs(path: str) -> None:
    with pytest.raises(ValueError, match="must be one of harness"):
        run_in_scheduler("model", [(f"{path} true", torch.zeros(1))])


def test_sglang_finds_it_by_its_path() -> None:
    assert f"{run_in_scheduler.__module__}.{run_in_scheduler.__name__}" == LOADER
