"""The cases and the catalogue of failures agree."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from harness.tools.diagnose.entries import ReproClass, catalogue
from harness.tools.repro import cases
from harness.tools.repro.case import Case, UnknownCase, all_cases, load
from harness.tools.repro.cases import memory, processes, weights

CHEAPEST: tuple[ReproClass, ...] = ("cpu", "hosts", "one_gpu", "several_gpus")
CASES = all_cases()


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.slug)
def test_a_case_is_of_an_entry_and_is_sound(case: Case) -> None:
    assert case.title and (case.signature or case.number)
    assert not case.entry.repro.no_case, f"{case.failure} says that it has no case, but {case.slug} is one"
    assert case.broken != case.healthy
    assert not case.on_gpu or case.needs == "cpu"
    assert case.number is None or case.number.healthy_below <= case.number.broken_above


@pytest.mark.parametrize("file", sorted(Path(cases.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_listing_cases_needs_no_torch(file: Path) -> None:
    imported = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in imported if "torch" in ast.unparse(node)]


@pytest.mark.parametrize("slug", catalogue())
def test_an_entry_has_a_case_or_says_why_not(slug: str) -> None:
    repro = catalogue()[slug].repro
    needs = [case.needs for case in CASES.values() if case.failure == slug]
    if needs:
        assert repro.needs == min(needs, key=CHEAPEST.index)
    else:
        assert repro.no_case.endswith("."), f"{slug} has no case and does not say why"


def test_there_are_at_least_as_many_cases_as_are_wanted() -> None:
    assert sum(case.needs in ("cpu", "hosts") for case in CASES.values()) >= 14
    assert sum(case.is_of(["one_gpu", "several_gpus"]) for case in CASES.values()) >= 14
    assert not CASES["safe-unpickler"].is_of(["one_gpu"]) and CASES["dsv3-qkv-a-split"].is_of(["one_gpu"])


def test_every_case_that_runs_without_a_gpu_was_seen() -> None:
    unseen = [
        slug
        for slug, case in CASES.items()
        if case.needs in ("cpu", "hosts")
        and not any(f"launch/repro.py run {slug}: " in seen.result for seen in case.entry.seen)
    ]
    assert unseen == []


@pytest.mark.parametrize(
    ("slug", "words"),
    [
        ("dsv3-qkv-splt", "did you mean dsv3-qkv-a-split"),
        ("fp8-reload", "is a known failure that has no case: It needs a checkpoint in FP8"),
        ("multinode-tp-init-timeout", "with cases of other names: debian-hosts-file, gloo-wrong-interface"),
    ],
)
def test_an_unknown_slug_is_one_sentence(slug: str, words: str) -> None:
    with pytest.raises(UnknownCase) as caught:
        load(slug)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def calls_of(slug: str, module: Any, broken: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of an engine that does nothing, in their order."""
    made: list[str] = []

    @contextmanager
    def stand_in(*args: Any, **options: Any) -> Iterator[Any]:
        engine = MagicMock()
        engine.release.side_effect = lambda: made.append("release")
        engine.resume.side_effect = lambda tags=None: made.append(f"resume{tags or ''}")
        engine.update.side_effect = lambda tensors, flush_cache=True: made.append(
            f"update {len(tensors)} {flush_cache}"
        )
        engine.print_difference.side_effect = lambda trainer: made.append("difference")
        yield engine

    monkeypatch.setattr(module, "tiny_engine", stand_in)
    for name, value in {"_free_bytes": 1 << 40, "_allocate": MagicMock(nbytes=1), "prepare_process": "cuda"}.items():
        monkeypatch.setattr(module, name, lambda *args, value=value, **options: value, raising=False)
    tensors = [("q", 0), ("k", 1), (weights.DOWN_PROJ, MagicMock())]
    monkeypatch.setattr(module, "checkpoint_tensors", lambda model: tensors, raising=False)
    load(slug).program(broken)
    return made


@pytest.mark.parametrize(
    ("module", "slug", "broken", "healthy"),
    [
        (weights, "cache-not-flushed", ["update 3 False"], ["update 3 True"]),
        (weights, "dsv3-qkv-a-split", ["update 1 True"] * 3 + ["difference"], ["update 3 True", "difference"]),
        (weights, "weights-did-not-arrive", ["update 2 True", "difference"], ["update 3 True", "difference"]),
        (weights, "wrong-shape-sent", ["update 3 True"], ["update 3 True"]),
        (weights, "moe-layer-freq", [], []),
        (memory, "double-resume-or-release", ["resume"], ["release", "resume"]),
        (memory, "release-twice", ["release", "release", "resume"], ["release", "resume"]),
        (memory, "release-not-idle", ["release", "resume"], ["release", "resume"]),
        (memory, "prefill-out-of-memory", [], []),
        (memory, "resume-before-empty-cache", ["release", "resume"], ["release", "resume"]),
        (memory, "tms-cumemcreate-oom", ["release", "resume"], ["release", "resume"]),
        (memory, "tp-memory-imbalance", [], []),
        (processes, "signal-outside-main-thread", [], []),
        (memory, "expandable-segments", ["release", "resume"], ["release", "resume"]),
        (
            memory,
            "weights-garbage-after-resume",
            ["release", "resume", "difference"],
            ["release", "resume", "update 3 True", "difference"],
        ),
        (
            memory,
            "ima-second-step",
            ["update 3 True", "difference", "release"]
            + ["resume['kv_cache']", "update 3 True", "difference", "release"] * 2,
            ["update 3 True", "difference", "release"] + ["resume", "update 3 True", "difference", "release"] * 2,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_program_asks_of_its_engine(
    module: Any, slug: str, broken: list[str], healthy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls_of(slug, module, True, monkeypatch) == broken
    assert calls_of(slug, module, False, monkeypatch) == healthy
