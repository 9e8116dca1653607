import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.schema import Config
from harness.runtime.events import EventLog
from harness.trainer.offload import local
from harness.weights.loader import EngineLoader
from harness.weights.log_probs import LogProbDifference, PartDifference
from harness.weights.verification.engine_weights import EngineWeights, how_unwritten
from harness.weights.verification.proof import Proof
from harness.weights.verification.refusals import NoBaseline, WeightsDidNotArrive
from harness.weights.verification.run_parts import RunParts
from harness.weights.verification.trainer_sums import TrainerSums
from harness.weights.worker.kept_trace import poison_value
from tests.weights.toy_model import SHAPES, Toy, ToySync, layout_of, live_name, live_of, sent, sync_to


class Tokens(SimpleNamespace):
    """Stands for Scored: what was measured."""

    apart: LogProbDifference
    own: LogProbDifference
    """The trainer's own rounding; asked for in `dtypes`."""
    at_1: tuple[float, float]
    """How far engine and trainer are from the trainer at temperature 1."""
    dtypes: list[torch.dtype]

    def difference(self) -> LogProbDifference:
        return self.apart

    def rounding(self, dtype: torch.dtype) -> LogProbDifference:
        self.dtypes.append(dtype)
        return self.own

    def at_temperature_1(self) -> tuple[LogProbDifference, LogProbDifference]:
        return difference(self.at_1[0]), difference(self.at_1[1])


def tokens(apart: float = 0.0, own: float = 0.0, at_1: tuple[float, float] = (1.0, 1.0)) -> Any:
    return Tokens(apart=difference(apart), own=difference(own), at_1=at_1, dtypes=[])


def check(proof: Proof, index: int, apart: float, **measured: Any) -> Any:
    scored = tokens(apart, **measured)
    at(proof, index).computed.check(scored)
    return scored


def at(proof: Proof, step: int) -> Proof:
    """The checks in a step of the run."""
    proof.run.events.step = step
    return proof


def NEVER(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is generated")


def proof_of(folder: Path, verify: bool = True, respond: Any = NEVER, **parts: Any) -> Proof:
    """Return the checks of a run without an engine, unless the parts have one."""
    config = Config()
    config.weights.verify = verify
    names = ("update_engine", "resume_weights", "resume_kv_cache", "release_all")
    engine = SimpleNamespace(can_ask=True, has_memory_saver=False, version="0.0")
    loader = SimpleNamespace(trace=lambda: None, coverage=())
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    model.config.get_text_config = lambda: model.config
    sent = SimpleNamespace(model=model)
    nothing = SimpleNamespace(engine=engine, loader=loader, sent=sent, **dict.fromkeys(names, lambda: None))
    given: dict[str, Any] = {"world": None, "actor": None, "source": folder, "sync": nothing, "memory": nothing}
    run = RunParts(config=config, events=EventLog(folder / "rank0.jsonl", 0, "here"), **given | parts)
    return Proof(run, respond)


def difference(mean: float) -> LogProbDifference:
    part = PartDifference(index=2, mean=mean, bulk=mean)
    spread = {"largest": 5.0, "percentile_99": 4.0, "k3": 0.1}
    return LogProbDifference(mean=mean, bulk=mean, tokens=256, sequence=part, position=part, **spread)


# What the engine computes


def fp8(folder: Path) -> Proof:
    proof = proof_of(folder)
    proof.run.config.model.dtype, proof.run.config.model.rollout_precision = "bfloat16", "fp8_block"
    return proof


def test_an_fp8_engine_may_be_as_far_from_the_trainer_as_its_own_first_load(tmp_path: Path) -> None:
    proof = fp8(tmp_path)
    proof.computed.set_baseline(tokens(0.15))
    check(proof, 0, 0.4)
    with pytest.raises(WeightsDidNotArrive, match="in the mean .allowed 0.45"):
        check(proof, 1, 0.5)
    with pytest.raises(NoBaseline, match="at most 0.6 makes sense"):
        fp8(tmp_path).computed.set_baseline(tokens(1.1))


def test_a_difference_above_what_is_allowed_or_undefined_fails_and_its_cause_is_unknown(tmp_path: Path) -> None:
    for mean in (1e-5, 0.0):
        check(proof_of(tmp_path), 0, mean)
    said = r"^step 2: .* in the mean \(allowed 1e-05\), .* sequence 2 .*: the cause is unknown$"
    for mean in (2e-5, math.inf, math.nan):
        with pytest.raises(WeightsDidNotArrive, match=said):
            check(proof_of(tmp_path), 2, mean)
        check(proof_of(tmp_path, verify=False), 2, mean)


def half(folder: Path, **parts: Any) -> Proof:
    proof = proof_of(folder, **parts)
    proof.run.config.model.dtype = "bfloat16"
    return proof


def test_the_trainers_own_rounding_is_what_passes_and_not_the_engines_difference(tmp_path: Path) -> None:
    proof, scored = half(tmp_path), tokens(0.009, own=0.007)
    proof.computed.set_baseline(scored)
    assert scored.dtypes == [torch.float32]
    assert check(proof, 0, 0.012).dtypes == [], "measured once"
    with pytest.raises(WeightsDidNotArrive):
        check(proof, 1, 0.02, own=0.007)
    check(proof, 5, 0.02, own=0.015)  # a rollout on which it rounds more is held to that
    assert check(half(tmp_path), 0, 0.009, own=0.007).dtypes == [torch.float32], "it has no baseline"
    with pytest.raises(WeightsDidNotArrive):
        check(half(tmp_path), 0, 0.03, own=0.007)
    with pytest.raises(NoBaseline, match="more than rounding: the trainer's own rounding in bfloat16 is 2.0e-03"):
        half(tmp_path).computed.set_baseline(tokens(0.009, own=0.002))


def test_in_float32_more_than_rounding_ends_the_run_but_for_what_the_engine_holds_narrower(tmp_path: Path) -> None:
    said = r"more than rounding.*rollout\.temperature = 0\.7.*launch/mismatch\.py"
    for mean in (2e-5, 0.1, math.inf):
        proof = proof_of(tmp_path)
        proof.run.config.rollout.temperature = 0.7
        with pytest.raises(NoBaseline, match=said):
            proof.computed.set_baseline(tokens(mean))
    copies = [SimpleNamespace(source=SimpleNamespace(name="layers.0.gate.weight"), held=torch.bfloat16)]
    proof = proof_of(tmp_path)
    proof.run.sync.loader.coverage = (SimpleNamespace(dtype=torch.float32, copies=[copies]),)
    scored = tokens(3e-4, own=5e-4)
    proof.computed.set_baseline(scored)
    assert scored.dtypes == [torch.bfloat16] and "layers.0.gate.weight in bfloat16" in proof.tolerance.sentence()
    with pytest.raises(NoBaseline):
        proof.computed.set_baseline(tokens(0.05, own=5e-4))


@pytest.mark.parametrize(
    ("temperature", "at_1", "said", "not_said"),
    [
        (0.7, (0.3, 0.0), "does not apply the temperature", "What the engine reported"),
        (0.7, (0.0, 0.3), "What the engine reported are log-probs at temperature 1", "does not apply"),
        (0.7, (0.3, 0.3), "Settings that could do it", "at temperature 1"),
        (1.0, (0.0, 0.0), "Settings that could do it", "at temperature 1"),
    ],
)
def test_the_temperature_is_named_only_where_log_probs_at_1_show_it(
    temperature: float, at_1: tuple[float, float], said: str, not_said: str, tmp_path: Path
) -> None:
    proof = proof_of(tmp_path)
    proof.run.config.rollout.temperature = temperature
    with pytest.raises(NoBaseline, match=said) as caught:
        proof.computed.set_baseline(tokens(1e-3, at_1=at_1))
    assert not_said not in str(caught.value)


def test_no_baseline_unverified_nor_of_random_weights(tmp_path: Path) -> None:
    off, random = proof_of(tmp_path, verify=False), proof_of(tmp_path)
    random.run.config.model.weights = "random"
    assert not off.load_own() and not random.load_own()
    assert random.why_no_baseline == "random weights are in no checkpoint"


@pytest.mark.parametrize(("has_baseline", "suspects"), [(True, True), (False, False)])
def test_log_probs_on_changed_weights_suspect_a_copy_only_if_they_once_agreed(
    has_baseline: bool, suspects: bool, tmp_path: Path
) -> None:
    proof = proof_of(tmp_path)
    if has_baseline:
        proof.tolerance.baseline = difference(1e-6)
    proof.computed.check_rehearsed(tokens(1e-5), {"gate.copy": "gate.copy, a copy"})
    with pytest.raises(WeightsDidNotArrive, match=r"with changed weights.* in the mean \(allowed 1e-05\)") as raised:
        proof.computed.check_rehearsed(tokens(2e-5), {})
    assert ("(stale-copy-of-weights)" in str(raised.value)) == suspects
    with pytest.raises(WeightsDidNotArrive, match=r"old weights .*\(stale-copy-of-weights\): gate.copy, a copy$"):
        proof.computed.check_rehearsed(tokens(2e-5), {"gate.copy": "gate.copy, a copy"})


# What it holds


class Trained:
    """An actor without memory to move."""

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield


@pytest.fixture
def toy(tmp_path: Path, alone: None) -> tuple[Proof, ToySync]:
    """The checks around syncs to a model in this process."""
    sync = sync_to(Toy(), live_of(sent(3)), layout_of(SHAPES))
    return proof_of(tmp_path, sync=sync, actor=Trained()), sync


def one_sync(proof: Proof, sync: ToySync, index: int) -> None:
    with at(proof, index).around_sync():
        sync.update_engine()


def test_healthy_syncs_pass_and_count_what_was_compared(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    for index in range(2):
        one_sync(proof, sync, index)
        proof.after_rollout()
    counts = proof.metrics()
    assert counts["sync_tensors_compared"] == counts["sync_tensors_held"] == len(SHAPES) - 1, "one is rounded"
    assert counts["sync_tensors_poisoned"] >= counts["sync_tensors"] - 4, "some are fused"


def test_nothing_is_claimed_of_a_poison_that_no_scheduler_answered(
    toy: tuple[Proof, ToySync], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, sync = toy
    monkeypatch.setattr(EngineWeights, "_poison", lambda self: None)
    one_sync(proof, sync, 0)
    assert proof.metrics()["sync_tensors_poisoned"] == proof.metrics()["sync_tensors_held"] == 0


def test_what_a_sync_did_not_write_is_told_from_other_values_though_the_trainer_has_not_moved(
    toy: tuple[Proof, ToySync],
) -> None:
    proof, sync = toy
    one_sync(proof, sync, 0)
    said = "step 1: after the sync the engine holds other weights: .*down: never written: 24 of 24 elements on rank 0"
    with pytest.raises(WeightsDidNotArrive, match=said), at(proof, 1).around_sync():
        pass
    with pytest.raises(WeightsDidNotArrive) as raised, at(proof, 2).around_sync():
        sync.update_engine()
        sync.model.down.data.view(-1)[:5] = poison_value(2)
        sync.model.qkv.data[4:6] *= 2
    assert "down: never written: 5 of 24 elements on rank 0" in str(raised.value)
    assert "k: written, with other values" in str(raised.value)
    assert how_unwritten("of 8 bits", [{}]) == ""


def test_a_stale_draft_is_named_only_where_no_update_wrote_it(
    toy: tuple[Proof, ToySync], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, sync = toy
    monkeypatch.setattr(EngineLoader, "of_draft", property(lambda loader: set(SHAPES)))
    stale = r"in its draft model alone \(mtp-draft-stale\): draft: down: never written: 24 of 24 elements on rank 0$"
    with pytest.raises(WeightsDidNotArrive, match=stale), at(proof, 0).around_sync():
        sync.update_engine()
        sync.model.down.data.fill_(poison_value(0))
    spoilt = "in its draft model alone: draft: down: written, with other values$"
    with pytest.raises(WeightsDidNotArrive, match=spoilt), at(proof, 1).around_sync():
        sync.update_engine()
        sync.model.down.data *= 2


def test_a_rehearsal_fails_on_log_probs_and_leaves_the_trainer_as_it_was(
    toy: tuple[Proof, ToySync], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, sync = toy
    before = {name: local(each).clone() for name, each in sync.tensors.items()}
    monkeypatch.setattr(proof, "respond", lambda index, most_tokens: None)
    monkeypatch.setattr(proof, "_score", lambda *batches: tokens(1e-7))
    proof.rehearse()
    assert proof.rehearsed and all(torch.equal(local(each), before[name]) for name, each in sync.tensors.items())
    assert not torch.equal(sync.model.down, before[live_name("down")]), "the engine got the changed weights"
    monkeypatch.setattr(proof, "_score", lambda *batches: tokens(0.1))
    with pytest.raises(
        WeightsDidNotArrive, match="in the rehearsal: with changed weights the engine's log-probs are off"
    ):
        proof.rehearse()


@pytest.mark.parametrize("computed", [5, 6])
def test_a_forward_pass_with_other_weights_than_were_held_is_named(
    computed: int, toy: tuple[Proof, ToySync], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, _ = toy
    monkeypatch.setattr(proof.run.actor, "model", None, raising=False)
    monkeypatch.setattr("harness.weights.verification.proof.forward_sums", lambda model: nullcontext({"w": computed}))
    proof.weights.sync.sums = TrainerSums(sent={}, held={"w": 5})
    fails = pytest.raises(WeightsDidNotArrive, match="forward pass computes with other weights .*: w$")
    with nullcontext() if computed == 5 else fails, proof._checked_forward():
        pass
    assert proof.weights.sync.forward == (computed == 5)


def test_what_changes_after_the_check_is_named_after_the_rollout(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    one_sync(proof, sync, 2)
    sync.model.down.data[0, 0] += 1
    with pytest.raises(WeightsDidNotArrive, match="step 2: after the rollout the engine holds other .*: down"):
        proof.after_rollout()


def test_a_buffer_that_no_sync_fills_must_stay_as_it_was(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    sync.model.register_buffer("rotary", torch.ones(4), persistent=False)
    one_sync(proof, sync, 0)
    sync.model.rotary.mul_(1.02)
    with pytest.raises(WeightsDidNotArrive, match="after the rollout .* has changed what no sync fills.*: rotary"):
        proof.after_rollout()
    with pytest.raises(WeightsDidNotArrive, match="has changed what no sync fills: rotary"):
        one_sync(proof, sync, 1)


def test_a_derived_tensor_that_is_old_or_that_the_loader_does_not_renew_is_named(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    sync.model.w_vc = torch.ones(2, 6)  # it would judge itself: nothing that the loader writes is old
    said = "holds other weights: w_kc, which the engine computes"
    with pytest.raises(WeightsDidNotArrive, match=said), at(proof, 0).around_sync():
        sync.update_engine()
        sync.model.w_kc = torch.zeros_like(sync.model.w_kc)
    with pytest.raises(WeightsDidNotArrive, match=r"derived once and does not renew: w_vc \(of kv_b_proj\)"):
        one_sync(proof, sync, 1)


def test_a_sender_that_sends_what_the_model_no_longer_holds_is_named_as_such(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    name = live_name("down")
    held = sync.tensors | {name: sync.tensors[name] + 1e-3}
    sync.held_tensors = lambda: held  # type: ignore[method-assign]
    said = "sent other values than the trainer's model holds: down.down.weight$"
    with pytest.raises(WeightsDidNotArrive, match=f"^step 1: the sync {said}"):
        one_sync(proof, sync, 1)
    proof.run.events.step = None
    with pytest.raises(WeightsDidNotArrive, match=f"^in the rehearsal: the sync {said}"):  # before a copy is suspected
        proof.rehearse()


def test_a_layer_that_nothing_trains_stays_what_the_checkpoint_has(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    name = live_name("down")
    sync.frozen = {name: sync.tensors[name]}
    one_sync(proof, sync, 0)
    said = "than the checkpoint has, of what nothing trains: down.down.weight"
    with pytest.raises(WeightsDidNotArrive, match=said), at(proof, 1).around_sync():
        sync.tensors[name].mul_(-1)
        sync.update_engine()


def test_the_first_sync_must_leave_what_the_engine_loaded_itself(toy: tuple[Proof, ToySync]) -> None:
    """Fingerprints would show two experts swapped in our names as swapped."""
    proof, sync = toy
    sync.update_engine()
    proof.weights.note_own_load()
    one_sync(proof, sync, 0)
    assert proof.weights.equals_own_load
    proof.weights.note_own_load()
    proof.weights.equals_own_load = False
    sync.tensors[live_name("down")].mul_(2)
    with pytest.raises(WeightsDidNotArrive, match="other weights than it loaded itself from .*: down$"):
        one_sync(proof, sync, 1)
    one_sync(proof, sync, 2)
    assert not proof.weights.equals_own_load, "it is compared once"


def test_what_is_sent_rounded_is_compared_with_the_own_load_as_rounded(tmp_path: Path, alone: None) -> None:
    model = Toy()
    model.gate.data = model.gate.data.float()
    values = sent(3) | {"gate": sent(3)["gate"].bfloat16()}
    layout = layout_of([name for name in SHAPES if name != "gate"]) + layout_of(["gate"], dtype=torch.bfloat16)
    sync = sync_to(model, live_of(values), layout)
    sync.update_engine()
    with torch.no_grad():
        model.gate.add_(model.gate * 2**-10)  # as the checkpoint has it, in float32
    proof = proof_of(tmp_path, sync=sync, actor=Trained())
    proof.weights.note_own_load()
    one_sync(proof, sync, 0)
    assert proof.weights.own_load is None and proof.weights.equals_own_load


def test_keys_and_values_of_older_weights_are_named(
    toy: tuple[Proof, ToySync], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, sync = toy
    cached = "harness.weights.verification.engine_weights.cached_prefix_tokens"
    monkeypatch.setattr(sync.engine, "ask", lambda function, argument=None: function(sync.model, argument))
    for tokens_there in (0, 580):
        monkeypatch.setattr(cached, partial(lambda model, _, tokens: tokens, tokens=tokens_there))
        if not tokens_there:
            one_sync(proof, sync, 0)
    with pytest.raises(WeightsDidNotArrive, match="cache-not-flushed.: 580 tokens in that of rank 0"):
        one_sync(proof, sync, 1)


def test_a_copy_is_judged_after_the_rollout_and_named(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    sync.update_engine()
    sync.model.copied = sync.model.down.detach().clone()
    proof.after_rollout()
    with torch.no_grad():
        sync.model.down.mul_(2)
    with pytest.raises(WeightsDidNotArrive, match="^step 3: .* old weights .*: copied, a copy that .* made of down"):
        at(proof, 3).after_rollout()


def test_a_copy_that_log_probs_on_other_weights_do_not_show_is_a_note(toy: tuple[Proof, ToySync]) -> None:
    proof, sync = toy
    sync.model.copied = sync.model.down.detach().clone()
    assert proof.weights.look_for_copies() == {}
    with torch.no_grad():
        sync.model.down.mul_(2)
    stale = proof.weights.look_for_copies()
    assert stale.keys() == {"copied"}
    proof.weights.excuse(stale)
    proof.after_rollout()
    with pytest.raises(WeightsDidNotArrive, match="draft.copied"):  # it decides no log-prob, so they excuse nothing
        proof.weights.excuse({"draft.copied": "draft.copied, a copy"})


def test_an_engine_that_cannot_be_asked_is_judged_by_log_probs_alone(tmp_path: Path) -> None:
    proof = proof_of(tmp_path)
    proof.run.sync.engine.can_ask = False
    proof.run.sync.weights = proof.run.sync.sent.draft_layer = SimpleNamespace(tensors={}, layout=(), converter=None)
    proof.run.sync.sent.held_tensors, proof.run.sync.sent.dtype = dict, None
    one_sync(proof, proof.run.sync, 0)
    proof.after_rollout()
    assert not proof.load_own() and "cannot be overwritten" in proof.why_no_baseline
    with pytest.raises(WeightsDidNotArrive, match="what it holds cannot be asked"):
        check(proof, 0, 1.0)
