"""The stages' logic on two ranks, each a thread, with a fake engine whose "GPU" is a number.

The real thing is in tests/end_to_end/test_gpu_memory.py.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from harness.rollout.memory_stages import MIB, MemoryDidNotMove, MemoryStages, WrongStage, wrong_move

SIZES = {"weights": 1000 * MIB, "kv_cache": 3000 * MIB, "cuda_graph": 100 * MIB}
LOST = (SIZES["kv_cache"], 151 * MIB, -200 * MIB)


@dataclass
class FakeEngine:
    """Not sglang: moves the bytes that it is told to, less `lost` of a tag; dies as sglang does of a wrong order."""

    group: Any
    has_memory_saver: bool = True
    lost: dict[str, int] = field(default_factory=dict)
    """Bytes of a tag that this rank's GPU does not give back, or does not take."""
    late: int = 0
    """How many readings pass before a move shows on this rank."""
    late_share: float = 1.0
    """The share of a move that these readings do not show yet."""
    free: int = 10_000 * MIB
    calls: list[str] = field(default_factory=list)
    _offloaded: set[str] = field(default_factory=set)
    _shown_after: int = 0
    _shown: int = 0

    def __post_init__(self) -> None:
        self._shown = self.free

    def release_memory_occupation(self, tags: Sequence[str]) -> None:
        self._move("release", tags, 1)

    def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        self._move("resume", tags, -1)

    def _move(self, action: str, tags: Sequence[str], sign: int) -> None:
        self.calls.append(f"{action} {' '.join(tags)}")
        for tag in tags:
            assert (tag in self._offloaded) == (sign < 0), "sglang's scheduler would be dead now"
            self._offloaded ^= {tag}
            self.free += sign * (SIZES[tag] - self.lost.get(f"{action} {tag}", 0))
        self._shown_after = self.late
        self._shown += int((1 - self.late_share) * (self.free - self._shown))

    def free_bytes(self) -> int:
        if self._shown_after:
            self._shown_after -= 1
        else:
            self._shown = self.free
        return self._shown


def on_two_ranks(scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run scenario(group, *arguments) on two threads, of which each is a rank; return what each saw."""
    met = threading.Barrier(2, timeout=60)
    values: dict[int, Any] = {}

    def all_gather(rank: int, value: Any) -> dict[int, Any]:
        values[rank] = value
        met.wait()
        gathered = {each: values[each] for each in range(2)}
        met.wait()
        return gathered

    groups = [SimpleNamespace(rank=rank, barrier=met.wait, all_gather=partial(all_gather, rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(lambda group: scenario(group, *arguments), groups))


def stages_of(engine: FakeEngine, **named: Any) -> MemoryStages:
    return MemoryStages(engine, engine.free_bytes, **{"patience_seconds": 0.05} | named)  # type: ignore[arg-type]


def failure(kind: type[Exception], work: Callable[[], None]) -> str:
    """The sentence of the error that it must raise."""
    with pytest.raises(kind) as caught:
        work()
    return str(caught.value)


def steps(group: Any, rounds: int, late: int = 0, has_memory_saver: bool = True, **named: Any) -> SimpleNamespace:
    """What an engine and its stages saw in so many PPO steps; it begins resumed."""
    engine = FakeEngine(group, has_memory_saver, late=group.rank * late)
    seen = SimpleNamespace(calls=engine.calls, free=[], facts=[], said=[])
    # a busy machine may take long for the late readings; nothing waits as long as this when the bytes are right
    note = {"fact": lambda name, **values: seen.facts.append(values), "say": seen.said.append}
    stages = stages_of(engine, patience_seconds=30, **note, **named)
    for _ in range(rounds):
        stages.resume_weights()
        seen.free.append(engine.free)
        stages.resume_kv_cache()
        stages.release_all()
    seen.free.append(engine.free)
    seen.released = stages.released
    return seen


def test_staged_resumes_the_weights_first() -> None:
    for seen in on_two_ranks(partial(steps, rounds=3, late=3, resume_mode="staged")):
        assert seen.calls[:4] == ["release kv_cache", "release weights", "resume weights", "resume kv_cache"]
        assert seen.free[:3] == [10_000 * MIB, 13_000 * MIB, 13_000 * MIB]
        assert [fact["moved"] // MIB for fact in seen.facts[:4]] == [3000, 1000, 1000, 3000]
        assert seen.facts[0]["expected"] is None and seen.facts[4]["expected"] == 3000 * MIB


def test_all_resumes_both_before_the_sync() -> None:
    for seen in on_two_ranks(partial(steps, rounds=3, late=3, resume_mode="all")):
        assert seen.calls[2:5] == ["resume weights kv_cache", "release kv_cache", "release weights"]
        assert seen.free[:3] == [10_000 * MIB] * 3


def steps_of_slow_releases(group: Any) -> Any:
    """The last 148 MiB of a KV cache come late: less than a twentieth of it, more than a twentieth of the rest."""
    engine = FakeEngine(group, late=2, late_share=148 / 3000)
    facts: list[dict[str, Any]] = []
    stages = stages_of(engine, patience_seconds=30, fact=lambda name, **values: facts.append(values))
    for _ in range(3):
        stages.release("kv_cache")
        stages.resume("kv_cache")
    return facts


def test_a_release_is_measured_to_its_end() -> None:
    for facts in on_two_ranks(steps_of_slow_releases):
        assert [fact["moved"] // MIB for fact in facts if fact["action"] == "release"] == [3000] * 3
        assert [fact["expected"] for fact in facts if fact["action"] == "resume"] == [SIZES["kv_cache"]] * 3


@pytest.mark.parametrize(
    ("mode", "resumes"),
    [
        ("staged", ["resume weights", "resume cuda_graph kv_cache"]),
        ("all", ["resume cuda_graph weights kv_cache"]),
    ],
)
def test_graphs_come_back_with_the_kv_cache_in_sglangs_own_order(mode: str, resumes: list[str]) -> None:
    releases = ["release kv_cache", "release weights", "release cuda_graph"]
    for seen in on_two_ranks(partial(steps, rounds=3, resume_mode=mode, holds_graphs=True)):
        assert seen.calls == releases + 2 * (resumes + releases)
        assert seen.free[-1] == 10_000 * MIB + sum(SIZES.values()) and seen.released == SIZES


def graphs_that_the_saver_does_not_hold(group: Any) -> str:
    engine = FakeEngine(group, lost={"release cuda_graph": SIZES["cuda_graph"]})
    return failure(MemoryDidNotMove, stages_of(engine, holds_graphs=True).release_all)


def test_graphs_are_measured_as_the_others_are() -> None:
    for said in on_two_ranks(graphs_that_the_saver_does_not_hold):
        assert said.startswith("release of cuda_graph on rank 0 freed 0 bytes")


def any_order(group: Any) -> Any:
    engine = FakeEngine(group)
    stages = stages_of(engine)
    stages.release("weights")
    stages.release("cuda_graph", "kv_cache")
    stages.resume("kv_cache", "weights")
    stages.release("weights")
    stages.release_all()  # what is left
    stages.resume("cuda_graph")
    stages.resume("weights", "kv_cache")
    before = list(engine.calls)
    stages.release("kv_cache")
    said = [
        failure(WrongStage, lambda: stages.release("kv_cache")),
        failure(WrongStage, lambda: stages.release("weights", "kv_cache")),
        failure(WrongStage, lambda: stages.resume("weights")),
        failure(WrongStage, lambda: stages.resume("kv_cache", "weights")),
    ]
    stages.release("weights")
    said.append(failure(WrongStage, stages.release_all))
    return before, engine.calls[len(before) :], said, engine.free


def test_any_order_of_tags_and_what_is_refused() -> None:
    for before, after, said, free in on_two_ranks(any_order):
        assert before[-3:] == ["release kv_cache", "resume cuda_graph", "resume weights kv_cache"]
        assert after == ["release kv_cache", "release weights"], "nothing that is refused reaches the engine"
        assert said[0] == "release of kv_cache: kv_cache is released already; resume it first."
        assert said[1] == "release of weights, kv_cache: kv_cache is released already; resume it first."
        assert said[2] == "resume of weights: weights is resumed already; release it first."
        assert said[3] == "resume of kv_cache, weights: weights is resumed already; release it first."
        assert "kv_cache is released" in said[4]
        assert free == 14_000 * MIB


def lost_bytes(group: Any, lost: dict[str, int], on_rank: int) -> str:
    stages = stages_of(FakeEngine(group, lost=lost if group.rank == on_rank else {}))

    def cycle() -> None:
        stages.release("kv_cache")
        stages.resume("kv_cache")

    return failure(MemoryDidNotMove, cycle)


def test_other_bytes_than_are_right_fail_on_every_rank_and_name_one() -> None:
    for on_rank in range(2):
        assert set(on_two_ranks(lost_bytes, {"release kv_cache": SIZES["kv_cache"]}, on_rank)) == {
            f"release of kv_cache on rank {on_rank} freed 0 bytes of its engine's GPU, but must free more than 0: the"
            " memory saver did not hold them."
        }
    for lost in LOST:
        took = f"{'only ' * (lost > 0)}{SIZES['kv_cache'] - lost}"
        assert set(on_two_ranks(lost_bytes, {"resume kv_cache": lost}, 1)) == {
            f"resume of kv_cache on rank 1 took {took} bytes of its engine's GPU, but an earlier release"
            f" freed {SIZES['kv_cache']} (allowed difference {150 * MIB})."
        }


def test_without_the_memory_saver_stages_do_nothing_and_say_so_once() -> None:
    for seen in on_two_ranks(partial(steps, rounds=2, has_memory_saver=False)):
        assert seen.calls == []
        assert seen.said == ["no torch_memory_saver: release and resume are no-ops, the engine keeps its memory"]


SLACKS = [(2 * MIB, 64 * MIB), (1000 * MIB, 64 * MIB), (100_000 * MIB, 5000 * MIB)]


@pytest.mark.parametrize(("expected", "slack"), SLACKS)
def test_the_slack_is_stated(expected: int, slack: int) -> None:
    def is_right(moved: int, action: Literal["release", "resume"] = "resume") -> bool:
        return not wrong_move(action, ["weights"], 0, expected, moved)

    assert f"allowed difference {slack}" in wrong_move("resume", ["weights"], 0, expected, 0)
    assert is_right(expected + slack) and is_right(max(1, expected - slack))
    assert not is_right(expected + slack + 1) and not is_right(expected - slack - 1)
    assert not is_right(0) and not is_right(-1)
    assert is_right(2 * expected + slack, "release"), "activations that torch kept are freed too"
    assert not is_right(expected - slack - 1, "release") and not is_right(0, "release")
