import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.schema import Config
from harness.runtime.events import EventLog
from harness.weights.log_probs import LogProbDifference, PartDifference
from harness.weights.verification.fingerprint import FingerprintComparison
from harness.weights.verification.rehearsal import ReloadComparison
from harness.weights.verification.reload import ReloadFindings
from harness.weights.verification.verification import Level, NoBaseline, Verification, WeightsDidNotArrive
from tests.cluster.gloo import on_ranks


class WithoutEngine(Verification):
    """Reading back finds `found`, or fails with it; all else is real."""

    found: Sequence[str] | Exception = ()

    def differences(self) -> Sequence[str]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def verification(folder: Path, level: Level = "log_probs", **parts: Any) -> WithoutEngine:
    config = Config()
    config.weights.verify = level
    given: dict[str, Any] = dict.fromkeys(("world", "memory", "sync", "prompts"))
    nothing = SimpleNamespace(
        update_engine=lambda: None, resume_weights=lambda: None, engine=SimpleNamespace(can_ask=True)
    )
    given |= {"source": folder, "sync": nothing, "memory": nothing}
    return WithoutEngine(config=config, events=EventLog(folder / "rank0.jsonl", 0, "here"), **given | parts)


def difference(mean: float) -> LogProbDifference:
    part = PartDifference(index=2, mean=mean, bulk=mean)
    spread = {"largest": 5.0, "percentile_99": 4.0, "k3": 0.1}
    return LogProbDifference(mean=mean, bulk=mean, tokens=256, sequence=part, position=part, **spread)


def NEVER(_: Any) -> Any:
    raise AssertionError("nothing is generated or computed")


def test_levels_are_cumulative(tmp_path: Path) -> None:
    reached = {level: verification(tmp_path, level) for level in ("off", "log_probs", "bytes", "full")}
    assert [[each.reaches(level) for level in reached] for each in reached.values()] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def _reload_folders(rank: int, folder: str) -> list[str]:
    (run := Path(folder) / f"sweep{rank}" / "seed0" / "events").mkdir(parents=True)
    world, sync = SimpleNamespace(rank=rank), SimpleNamespace(folder=Path(folder))
    checks = verification(run, "full", world=world, sync=sync)
    return [str(checks.make_reload_folder()) for _ in range(2)]


def test_runs_with_one_name_and_one_weights_folder_reload_from_folders_of_their_own(tmp_path: Path) -> None:
    one, other = on_ranks(_reload_folders, 2, tmp_path, str(tmp_path))
    assert one == other and len(set(one)) == 2
    assert all(Path(each).name.startswith("seed0-reload-") and Path(each).stat().st_mode & 0o77 == 0 for each in one)


def fp8(folder: Path, level: Level = "bytes", **parts: Any) -> WithoutEngine:
    checks = verification(folder, level, world=SimpleNamespace(device_type="cpu"), **parts)
    checks.config.model.dtype, checks.config.model.rollout_precision = "bfloat16", "fp8_block"
    return checks


def test_an_fp8_engine_may_be_as_far_from_the_trainer_as_its_own_first_load(tmp_path: Path) -> None:
    checks = fp8(tmp_path)
    checks.set_baseline(difference(0.15))
    checks.check_log_probs(0, difference(0.4))
    with pytest.raises(WeightsDidNotArrive, match="in the mean .allowed 0.45"):
        checks.check_log_probs(1, difference(0.5))
    with pytest.raises(NoBaseline, match="at most 0.6 makes sense"):
        fp8(tmp_path).set_baseline(difference(1.1))


def test_only_the_last_sync_of_another_precision_is_reloaded(tmp_path: Path) -> None:
    assert fp8(tmp_path).reloads_last and not fp8(tmp_path, "log_probs").reloads_last
    assert not verification(tmp_path, "full").reloads_last
    saved: list[Path] = []
    engine = SimpleNamespace(can_ask=True)
    checks = fp8(tmp_path, sync=SimpleNamespace(save=lambda folder, source: saved.append(folder), engine=engine))
    checks.save_last(checks.config.run.steps - 1)
    checks.check_last(checks.config.run.steps - 1)
    assert saved == [] and not checks.reloaded_last


def test_a_reload_that_changes_anything_fails_however_far_the_trainer_is(tmp_path: Path) -> None:
    checks = fp8(tmp_path)
    checks.set_baseline(difference(0.15))
    checks.refuse_reload(ReloadComparison(changed=[], same_outputs=True, apart=0.0), 3)
    with pytest.raises(WeightsDidNotArrive, match=r"^step 3: a reload .* what the engine holds: a$"):
        checks.refuse_reload(ReloadComparison(changed=["a"], same_outputs=True, apart=0.0), 3)
    with pytest.raises(WeightsDidNotArrive, match="greedy log-probs by 1.00e-06"):
        checks.refuse_reload(ReloadComparison(changed=[], same_outputs=False, apart=1e-6), 3)
    checks.world = SimpleNamespace(device_type="cuda")  # not deterministic, unless asked for
    checks.refuse_reload(ReloadComparison(changed=[], same_outputs=False, apart=0.005), 3)
    with pytest.raises(WeightsDidNotArrive, match=r"by 1.00e-02 .* .allowed 0.0078"):
        checks.refuse_reload(ReloadComparison(changed=[], same_outputs=False, apart=0.01), 3)


@pytest.mark.parametrize("mean", [1e-5, 0.0])
def test_a_difference_within_what_is_allowed_passes(mean: float, tmp_path: Path) -> None:
    verification(tmp_path).check_log_probs(0, difference(mean))


@pytest.mark.parametrize("mean", [2e-5, math.inf, math.nan])
def test_a_larger_or_undefined_difference_fails_and_names_suspects(mean: float, tmp_path: Path) -> None:
    checks = verification(tmp_path)
    checks.found = ["lm_head.weight"]
    with pytest.raises(
        WeightsDidNotArrive,
        match=r"^step 2: .* in the mean \(allowed 1e-05\), .* sequence 2 \(.*trainer's: lm_head\.weight$",
    ):
        checks.check_log_probs(2, difference(mean))


@pytest.mark.parametrize("mean", [2e-5, math.inf])
def test_at_off_nothing_fails(mean: float, tmp_path: Path) -> None:
    verification(tmp_path, "off").check_log_probs(2, difference(mean))


def test_a_failed_search_for_suspects_does_not_hide_the_difference(tmp_path: Path) -> None:
    checks = verification(tmp_path)
    checks.found = OSError("no shared folder")
    with pytest.raises(WeightsDidNotArrive, match=r"off by 1\.00e\+00 .*search for them failed \(OSError: no sh"):
        checks.check_log_probs(0, difference(1.0))


def test_a_baseline_moves_what_is_allowed(tmp_path: Path) -> None:
    checks = verification(tmp_path)
    checks.set_baseline(difference(0.01))
    checks.check_log_probs(0, difference(0.02))
    with pytest.raises(WeightsDidNotArrive):
        checks.check_log_probs(0, difference(0.04))


@pytest.mark.parametrize("mean", [0.11, math.inf])
def test_a_baseline_that_proves_nothing_ends_the_run(mean: float, tmp_path: Path) -> None:
    with pytest.raises(NoBaseline, match="SGLang and transformers do not compute the same model"):
        verification(tmp_path).set_baseline(difference(mean))


def test_no_baseline_at_off_nor_of_random_weights(tmp_path: Path) -> None:
    off, random = verification(tmp_path, "off"), verification(tmp_path)
    random.config.model.weights = "random"
    assert not off.load_baseline() and not random.load_baseline()
    assert random.why_no_baseline == "random weights are in no checkpoint"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ((), ""),
        (("lm_head.weight",), r"lm_head\.weight"),
    ],
)
def test_a_fingerprint_that_differs_fails_the_run_and_is_named(
    wrong: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = SimpleNamespace(engine=SimpleNamespace(can_ask=True), weights=None, loader=None, unfilled=[])
    checks = verification(tmp_path, sync=sync)
    found = FingerprintComparison(tensors=2, left=(), compared=2, wrong=wrong)
    monkeypatch.setattr("harness.weights.verification.verification.compare_fingerprints", lambda weights, loader: found)
    monkeypatch.setattr("harness.weights.verification.verification.load_again", lambda *_: ReloadFindings())
    if not named:
        checks.check_arrival(3)
        assert checks.sync_metrics()["sync_tensors_compared"] == 2
        return
    with pytest.raises(WeightsDidNotArrive, match=rf"^step 3: .* other weights: {named}$"):
        checks.check_arrival(3)


def test_a_copy_is_judged_after_the_rollout_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    checks = verification(tmp_path, sync=SimpleNamespace(engine=SimpleNamespace(can_ask=True, ask=asked.append)))
    stale: list[str] = []
    monkeypatch.setattr("harness.weights.verification.verification.describe_stale_copies", lambda engine: stale)
    checks.find_copies(3)
    assert len(asked) == 1
    stale.append("gate.copy, a copy of gate.weight")
    with pytest.raises(WeightsDidNotArrive, match="^step 3: .* old weights .*: gate.copy, a copy of gate.weight$"):
        checks.find_copies(3)


@pytest.mark.parametrize(("has_baseline", "suspects"), [(True, True), (False, False)])
def test_log_probs_on_changed_weights_suspect_a_copy_only_if_they_once_agreed(
    has_baseline: bool, suspects: bool, tmp_path: Path
) -> None:
    checks = verification(tmp_path, "full")
    if has_baseline:
        checks.set_baseline(difference(1e-6))
    checks.check_changed_log_probs(1, difference(1e-5))
    with pytest.raises(
        WeightsDidNotArrive, match=r"^step 1: on changed weights.* in the mean \(allowed 1e-05\)"
    ) as raised:
        checks.check_changed_log_probs(1, difference(2e-5))
    assert ("(stale-copy-of-weights)" in str(raised.value)) == suspects


def test_an_engine_that_cannot_be_asked_is_judged_by_log_probs_alone(tmp_path: Path) -> None:
    closed = SimpleNamespace(engine=SimpleNamespace(can_ask=False))
    checks = verification(tmp_path, "full", sync=closed)
    assert checks.level == "log_probs" and not checks.reaches("bytes")
    checks.rehearse(0, NEVER, NEVER)
    checks.check_arrival(0)
    assert not checks.load_baseline() and "cannot be filled with garbage" in checks.why_no_baseline
    with pytest.raises(WeightsDidNotArrive, match="tensors cannot be read back from this engine$"):
        checks.check_log_probs(0, difference(1.0))
