import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.schema import Config
from harness.runtime.events import EventLog
from harness.weights.log_probs import LogProbDifference, PartDifference
from harness.weights.verification.checked_run import CheckedRun, Level
from harness.weights.verification.disk_reload import DiskReloads, ReloadComparison
from harness.weights.verification.held import HeldWeights
from harness.weights.verification.refusals import NoBaseline, WeightsDidNotArrive
from harness.weights.verification.second_look import SecondLook
from harness.weights.verification.verification import Verification
from tests.cluster.gloo import on_ranks
from tests.weights.toy_model import SHAPES, Toy, ToySync, layout_of, live_of, sent, sync_to


@dataclass(kw_only=True)
class WithoutEngine(HeldWeights):
    """Reading back finds `found`, or fails with it; all else is real."""

    found: Sequence[str] | Exception = ()

    def differences(self) -> Sequence[str]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Tokens(SimpleNamespace):
    """Stands for Scored: what was measured, and what a second look shows."""

    apart: LogProbDifference
    own: LogProbDifference
    """The trainer's own rounding; asked for in `dtypes`."""
    look: SecondLook
    dtypes: list[torch.dtype]

    def difference(self) -> LogProbDifference:
        return self.apart

    def rounding(self, dtype: torch.dtype) -> LogProbDifference:
        self.dtypes.append(dtype)
        return self.own

    def look_again(self, engine: Any) -> SecondLook:
        return self.look


def tokens(apart: float = 0.0, own: float = 0.0, **look: float) -> Any:
    """look: fields of a SecondLook; those not given are `apart`."""
    parts = {name: difference(look.get(name, apart)) for name in ("fresh", "cached", "reported")}
    seen = SecondLook(moved=look.get("moved", 0.0), **parts)
    return Tokens(apart=difference(apart), own=difference(own), look=seen, dtypes=[])


def check(checks: Verification, index: int, apart: float, **measured: float) -> Any:
    scored = tokens(apart, **measured)
    at(checks, index).log_probs.check(scored.apart, scored)
    return scored


def at(checks: Verification, step: int) -> Verification:
    """The checks in a step of the run."""
    checks.run.events.step = step
    return checks


def verification(folder: Path, level: Level = "log_probs", found: Any = (), **parts: Any) -> Verification:
    """Return checks of a run without an engine, unless the parts have one. found: what reading back finds, or fails
    with."""
    config = Config()
    config.weights.verify = level
    given: dict[str, Any] = dict.fromkeys(("world", "memory", "sync"))
    names = ("update_engine", "resume_weights", "resume_kv_cache", "release_all")
    engine = SimpleNamespace(can_ask=True, has_memory_saver=False, version="0.0")
    loader = SimpleNamespace(trace=lambda: None, coverage=())
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    model.config.get_text_config = lambda: model.config
    sent = SimpleNamespace(model=model)
    nothing = SimpleNamespace(engine=engine, loader=loader, sent=sent, **dict.fromkeys(names, lambda: None))
    given |= {"source": folder, "sync": nothing, "memory": nothing}
    run = CheckedRun(config=config, events=EventLog(folder / "rank0.jsonl", 0, "here"), **given | parts)
    checks = Verification(run, prompts=())
    checks.held = checks.log_probs.held = WithoutEngine(run=run, found=found)
    return checks


def difference(mean: float) -> LogProbDifference:
    part = PartDifference(index=2, mean=mean, bulk=mean)
    spread = {"largest": 5.0, "percentile_99": 4.0, "k3": 0.1}
    return LogProbDifference(mean=mean, bulk=mean, tokens=256, sequence=part, position=part, **spread)


def NEVER(*_: Any) -> Any:
    raise AssertionError("nothing is generated or computed")


def test_levels_are_cumulative(tmp_path: Path) -> None:
    reached = {level: verification(tmp_path, level) for level in ("off", "log_probs", "bytes", "full")}
    assert [[each.run.reaches(level) for level in reached] for each in reached.values()] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def _reload_folders(rank: int, folder: str) -> list[str]:
    (run := Path(folder) / f"sweep{rank}" / "seed0" / "events").mkdir(parents=True)
    world, sync = SimpleNamespace(rank=rank), SimpleNamespace(folder=Path(folder))
    checks = verification(run, "full", world=world, sync=sync)
    return [str(checks.reloads.make_folder()) for _ in range(2)]


@pytest.mark.long
def test_runs_with_one_name_and_one_weights_folder_reload_from_folders_of_their_own(tmp_path: Path) -> None:
    one, other = on_ranks(_reload_folders, 2, tmp_path, str(tmp_path))
    assert one == other and len(set(one)) == 2
    assert all(Path(each).name.startswith("seed0-reload-") and Path(each).stat().st_mode & 0o77 == 0 for each in one)


def fp8(folder: Path, level: Level = "bytes", **parts: Any) -> Verification:
    checks = verification(folder, level, world=SimpleNamespace(device_type="cpu"), **parts)
    checks.run.config.model.dtype, checks.run.config.model.rollout_precision = "bfloat16", "fp8_block"
    return checks


def test_an_fp8_engine_may_be_as_far_from_the_trainer_as_its_own_first_load(tmp_path: Path) -> None:
    checks = fp8(tmp_path)
    checks.log_probs.set_baseline(tokens(0.15))
    check(checks, 0, 0.4)
    with pytest.raises(WeightsDidNotArrive, match="in the mean .allowed 0.45"):
        check(checks, 1, 0.5)
    with pytest.raises(NoBaseline, match="at most 0.6 makes sense"):
        fp8(tmp_path).log_probs.set_baseline(tokens(1.1))


def test_only_the_last_sync_of_another_precision_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskReloads, "write", lambda self, what: tmp_path)
    last = Config().run.steps
    for checks in (fp8(tmp_path), fp8(tmp_path, "full")):
        assert at(checks, last - 1).reloads.write_last_sync() is None
        assert at(checks, last).reloads.write_last_sync() == tmp_path
    for checks in (fp8(tmp_path, "log_probs"), verification(tmp_path, "full")):
        assert at(checks, last).reloads.write_last_sync() is None
        checks.reloads.check_last_sync(None)
        assert not checks.reloads.last_sync_is_equal


def test_a_reload_that_changes_anything_fails_however_far_the_trainer_is(tmp_path: Path) -> None:
    checks = fp8(tmp_path)
    checks.log_probs.set_baseline(tokens(0.15))
    at(checks, 3).reloads.judge(ReloadComparison(changed=[], same_outputs=True, apart=0.0))
    with pytest.raises(WeightsDidNotArrive, match=r"^step 3: a reload .* what the engine holds: a$"):
        at(checks, 3).reloads.judge(ReloadComparison(changed=["a"], same_outputs=True, apart=0.0))
    with pytest.raises(WeightsDidNotArrive, match="greedy log-probs by 1.00e-06"):
        at(checks, 3).reloads.judge(ReloadComparison(changed=[], same_outputs=False, apart=1e-6))
    checks.run.world.device_type = "cuda"  # not deterministic, unless asked for
    at(checks, 3).reloads.judge(ReloadComparison(changed=[], same_outputs=False, apart=0.005))
    with pytest.raises(WeightsDidNotArrive, match=r"by 1.00e-02 .* .allowed 0.0078"):
        at(checks, 3).reloads.judge(ReloadComparison(changed=[], same_outputs=False, apart=0.01))


@pytest.mark.parametrize("mean", [1e-5, 0.0])
def test_a_difference_within_what_is_allowed_passes(mean: float, tmp_path: Path) -> None:
    check(verification(tmp_path), 0, mean)


@pytest.mark.parametrize("mean", [2e-5, math.inf, math.nan])
def test_a_larger_or_undefined_difference_fails_and_names_suspects(mean: float, tmp_path: Path) -> None:
    checks = verification(tmp_path, found=["lm_head.weight"])
    with pytest.raises(
        WeightsDidNotArrive,
        match=r"^step 2: .* in the mean \(allowed 1e-05\), .* sequence 2 \(.*trainer's: lm_head\.weight;",
    ):
        check(checks, 2, mean)


@pytest.mark.parametrize("mean", [2e-5, math.inf])
def test_at_off_nothing_fails(mean: float, tmp_path: Path) -> None:
    check(verification(tmp_path, "off"), 2, mean)


def test_a_failed_search_for_suspects_does_not_hide_the_difference(tmp_path: Path) -> None:
    checks = verification(tmp_path, found=OSError("no shared folder"))
    with pytest.raises(WeightsDidNotArrive, match=r"off by 1\.00e\+00 .*search for them failed \(OSError: no sh"):
        check(checks, 0, 1.0)


def half(folder: Path, **parts: Any) -> Verification:
    checks = verification(folder, **parts)
    checks.run.config.model.dtype = "bfloat16"
    return checks


def test_the_trainers_own_rounding_is_what_passes_and_not_the_engines_difference(tmp_path: Path) -> None:
    checks, scored = half(tmp_path), tokens(0.009, own=0.007)
    checks.log_probs.set_baseline(scored)
    assert scored.dtypes == [torch.float32]
    assert check(checks, 0, 0.012).dtypes == [], "measured once"
    with pytest.raises(WeightsDidNotArrive):
        check(checks, 1, 0.02, own=0.007)
    with pytest.raises(NoBaseline, match="more than rounding: the trainer's own rounding in bfloat16 is 2.0e-03"):
        half(tmp_path).log_probs.set_baseline(tokens(0.009, own=0.002))


def test_without_a_baseline_the_first_rollout_says_what_the_trainer_rounds(tmp_path: Path) -> None:
    checks = half(tmp_path)
    assert check(checks, 0, 0.009, own=0.007).dtypes == [torch.float32]
    with pytest.raises(WeightsDidNotArrive):
        check(half(tmp_path), 0, 0.03, own=0.007)


def test_a_rollout_on_which_the_trainer_rounds_more_is_held_to_that(tmp_path: Path) -> None:
    checks = half(tmp_path)
    checks.log_probs.set_baseline(tokens(0.009, own=0.007))
    check(checks, 5, 0.02, own=0.015)


@pytest.mark.parametrize("mean", [2e-5, 0.1, math.inf])
def test_in_float32_more_than_rounding_ends_the_run(mean: float, tmp_path: Path) -> None:
    checks = verification(tmp_path)
    checks.run.config.rollout.temperature = 0.7
    with pytest.raises(NoBaseline, match=r"more than rounding.*rollout\.temperature = 0\.7.*launch/mismatch\.py"):
        checks.log_probs.set_baseline(tokens(mean))


def test_in_float32_a_tensor_that_the_engine_holds_narrower_explains_a_difference_by_name(tmp_path: Path) -> None:
    view = SimpleNamespace(name="layers.0.gate.weight")
    copies = [SimpleNamespace(source=view, held=torch.bfloat16)]
    checks = verification(tmp_path)
    checks.run.sync.loader.coverage = (SimpleNamespace(dtype=torch.float32, copies=[copies]),)
    scored = tokens(3e-4, own=5e-4)
    checks.log_probs.set_baseline(scored)
    assert scored.dtypes == [torch.bfloat16] and "layers.0.gate.weight in bfloat16" in checks.tolerance.sentence()
    with pytest.raises(NoBaseline):
        checks.log_probs.set_baseline(tokens(0.05, own=5e-4))


@pytest.mark.parametrize(
    ("look", "index", "temperature", "said", "not_said"),
    [
        ({"fresh": 0.0}, 1, 1.0, r"from the prefixes .*\(cache-not-flushed\)", "temperature 0"),
        ({"fresh": 0.0, "cached": 0.0}, 1, 1.0, r"cache-not-flushed\?", "both compute the same model"),
        ({}, 1, 1.0, "in the rollouts before they agreed: so it is neither the head nor the temperature", "cache-not"),
        ({}, 0, 1.0, "what the two compute differs", "old"),
        ({"fresh": 0.0, "cached": 0.0}, 0, 1.0, "what the engine reported while it generated is wrong", "cache-not"),
        ({"fresh": 0.0, "moved": 0.0}, 0, 0.7, "does not apply the temperature", "cache-not"),
        ({"fresh": 0.0, "moved": 0.3, "reported": 0.0}, 0, 0.7, "sampled at 0.7", "cache-not"),
    ],
)
def test_a_name_needs_a_second_look_that_shows_it(
    look: dict[str, float], index: int, temperature: float, said: str, not_said: str, tmp_path: Path
) -> None:
    checks = verification(tmp_path)
    checks.run.config.rollout.temperature = temperature
    for earlier in range(index):
        check(checks, earlier, 1e-7)
    with pytest.raises(WeightsDidNotArrive, match=said) as caught:
        check(checks, index, 1e-3, **look)
    assert not_said not in str(caught.value)


def test_an_engine_that_has_lost_its_weights_gets_them_before_the_second_look(tmp_path: Path) -> None:
    checks, calls = half(tmp_path), []
    checks.run.sync.engine.has_memory_saver = True
    checks.run.sync.update_engine = lambda: calls.append("sync")
    with pytest.raises(WeightsDidNotArrive):
        check(checks, 0, 0.5, own=0.007)
    assert calls == ["sync"]


def test_no_baseline_at_off_nor_of_random_weights(tmp_path: Path) -> None:
    off, random = verification(tmp_path, "off"), verification(tmp_path)
    random.run.config.model.weights = "random"
    assert not off.load_baseline() and not random.load_baseline()
    assert random.why_no_baseline == "random weights are in no checkpoint"


@pytest.fixture
def toy(tmp_path: Path, alone: None) -> tuple[Verification, ToySync]:
    """The checks of the default level around syncs to a model in this process."""
    values = sent(3)
    sync = sync_to(Toy(), live_of(values), layout_of(SHAPES))
    return verification(tmp_path, sync=sync), sync


def test_healthy_syncs_pass_and_count_what_was_compared(toy: tuple[Verification, ToySync]) -> None:
    checks, sync = toy
    for index in range(2):
        at(checks, index).held.poison()
        sync.update_engine()
        at(checks, index).held.check_after_sync()
        at(checks, index).held.check_after_rollout()
    assert checks.held.metrics()["sync_tensors_compared"] == len(SHAPES) - 1, "one is rounded, and loaded again"


def test_a_sync_that_brings_nothing_fails_though_the_trainer_has_not_moved(toy: tuple[Verification, ToySync]) -> None:
    checks, sync = toy
    sync.update_engine()
    at(checks, 0).held.check_after_sync()
    at(checks, 1).held.poison()
    with pytest.raises(WeightsDidNotArrive, match="step 1: after the sync the engine holds other weights: .*down"):
        at(checks, 1).held.check_after_sync()


def test_weights_that_change_after_the_check_are_named_after_the_rollout(toy: tuple[Verification, ToySync]) -> None:
    checks, sync = toy
    sync.update_engine()
    at(checks, 2).held.check_after_sync()
    sync.model.down.data[0, 0] += 1
    with pytest.raises(WeightsDidNotArrive, match="step 2: after the rollout the engine holds other .*: down"):
        at(checks, 2).held.check_after_rollout()


def test_a_buffer_that_no_sync_fills_must_stay_as_it_was(toy: tuple[Verification, ToySync]) -> None:
    checks, sync = toy
    sync.model.register_buffer("rotary", torch.ones(4), persistent=False)
    sync.update_engine()
    at(checks, 0).held.check_after_sync()
    sync.model.rotary.mul_(1.02)
    with pytest.raises(WeightsDidNotArrive, match="after the rollout .* has changed what no sync fills.*: rotary"):
        at(checks, 0).held.check_after_rollout()
    with pytest.raises(WeightsDidNotArrive, match="has changed what no sync fills: rotary"):
        at(checks, 1).held.check_after_sync()


def test_a_sender_that_sends_what_the_model_no_longer_holds_is_named_as_such(toy: tuple[Verification, ToySync]) -> None:
    checks, sync = toy
    held = {name: tensor.detach().clone() for name, tensor in sync.tensors.items()}
    held["down.down.weight"].add_(1e-3)
    sync.held_tensors = lambda: held  # type: ignore[method-assign]
    sync.update_engine()
    with pytest.raises(
        WeightsDidNotArrive, match="sent other values than the trainer's model holds: down.down.weight$"
    ):
        at(checks, 1).held.check_after_sync()


def test_keys_and_values_of_older_weights_are_named(
    toy: tuple[Verification, ToySync], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, sync = toy
    sync.update_engine()
    cached = "harness.weights.verification.held.cached_prefix_tokens"
    monkeypatch.setattr(cached, partial(lambda model, _, tokens: tokens, tokens=0))
    monkeypatch.setattr(sync.engine, "ask", lambda function, argument=None: function(sync.model, argument))
    at(checks, 0).held.check_after_sync()
    monkeypatch.setattr(cached, partial(lambda model, _, tokens: tokens, tokens=580))
    with pytest.raises(WeightsDidNotArrive, match="cache-not-flushed.: 580 tokens in that of rank 0"):
        at(checks, 1).held.check_after_sync()


def test_a_copy_is_judged_after_the_rollout_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    checks = verification(tmp_path, sync=SimpleNamespace(engine=SimpleNamespace(can_ask=True, ask=asked.append)))
    stale: list[str] = []
    monkeypatch.setattr("harness.weights.verification.held.describe_stale_copies", lambda engine: stale)
    at(checks, 3).held.find_copies()
    assert len(asked) == 1
    stale.append("gate.copy, a copy of gate.weight")
    with pytest.raises(WeightsDidNotArrive, match="^step 3: .* old weights .*: gate.copy, a copy of gate.weight$"):
        at(checks, 3).held.find_copies()


@pytest.mark.parametrize(("has_baseline", "suspects"), [(True, True), (False, False)])
def test_log_probs_on_changed_weights_suspect_a_copy_only_if_they_once_agreed(
    has_baseline: bool, suspects: bool, tmp_path: Path
) -> None:
    checks = verification(tmp_path, "full")
    if has_baseline:
        checks.tolerance.baseline = difference(1e-6)
    at(checks, 1).rehearsal.check_log_probs(tokens(1e-5))
    with pytest.raises(
        WeightsDidNotArrive, match=r"^step 1: on changed weights.* in the mean \(allowed 1e-05\)"
    ) as raised:
        at(checks, 1).rehearsal.check_log_probs(tokens(2e-5))
    assert ("(stale-copy-of-weights)" in str(raised.value)) == suspects


def test_an_engine_that_cannot_be_asked_is_judged_by_log_probs_alone(tmp_path: Path) -> None:
    checks = verification(tmp_path, "full")
    checks.run.sync.engine.can_ask = False
    assert checks.run.level == "log_probs" and not checks.run.reaches("bytes")
    checks.rehearsal.rehearse(NEVER, NEVER)
    at(checks, 0).held.poison()
    at(checks, 0).held.check_after_rollout()
    assert not checks.load_baseline() and "cannot be overwritten" in checks.why_no_baseline
    with pytest.raises(WeightsDidNotArrive, match="tensors cannot be read back from this engine$"):
        check(checks, 0, 1.0)
