"""The cases and the catalogue of failures agree."""

import ast
import inspect
from importlib import import_module

import pytest

from harness.tools.diagnose.entries import ReproClass, catalogue
from harness.tools.repro.case import Case, Number, UnknownCase, entry_of, load, module_name, slugs

CHEAPEST: tuple[ReproClass, ...] = ("cpu", "hosts", "one_gpu", "several_gpus")
CASES = {slug: load(slug) for slug in slugs()}


@pytest.mark.parametrize("slug", CASES)
def test_a_case_is_of_an_entry_and_is_sound(slug: str) -> None:
    case = CASES[slug]
    entry = entry_of(slug, case)
    assert case.title and case.failure != slug, "failure is left out where the case has the entry's name"
    assert not entry.repro.no_case, f"{entry.slug} says that it has no case, but {slug} is one"
    assert case.broken != case.healthy
    assert not case.on_gpu or case.needs == "cpu"
    assert case.number is None or case.number.healthy_below <= case.number.broken_above
    module = import_module(module_name(slug))
    assert "torch" not in imported_at_import(inspect.getsource(module))
    assert list(inspect.signature(module.program).parameters) == ["broken"]


@pytest.mark.parametrize("slug", catalogue())
def test_an_entry_has_a_case_or_says_why_not(slug: str) -> None:
    repro = catalogue()[slug].repro
    cases = [case for name, case in CASES.items() if entry_of(name, case).slug == slug]
    if cases:
        assert repro.needs == min((case.needs for case in cases), key=CHEAPEST.index)
    else:
        assert repro.no_case.endswith("."), f"{slug} has no case and does not say why"


def test_there_are_at_least_as_many_cases_as_are_wanted() -> None:
    assert sum(case.needs in ("cpu", "hosts") for case in CASES.values()) >= 14
    assert sum(case.is_of(["one_gpu", "several_gpus"]) for case in CASES.values()) >= 14


def test_every_case_that_runs_without_a_gpu_was_seen() -> None:
    unseen = [
        slug
        for slug, case in CASES.items()
        if case.needs in ("cpu", "hosts")
        and not any(f"launch/repro.py run {slug}: " in seen.result for seen in entry_of(slug, case).seen)
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


def test_a_case_must_be_able_to_show_something() -> None:
    with pytest.raises(ValueError, match="must have a signature or a number"):
        Case(needs="cpu", broken="b", healthy="h")


def test_a_limit_follows_from_engine_and_device() -> None:
    case = Case(needs="cpu", broken="b", healthy="h", signature=("s",))
    assert (
        case.timeout_seconds
        < Case(needs="one_gpu", broken="b", healthy="h", signature=("s",), engine=True).timeout_seconds
    )
    assert Case(needs="cpu", broken="b", healthy="h", signature=("s",), timeout_seconds=7).timeout_seconds == 7


def test_gpus_of_a_case() -> None:
    number = Number(name="n", broken_above=1, healthy_below=1)
    plain = Case(needs="cpu", broken="b", healthy="h", number=number)
    engine = Case(needs="cpu", broken="b", healthy="h", number=number, engine=True, on_gpu=True)
    pair = Case(needs="several_gpus", broken="b", healthy="h", number=number, engine=True)
    assert [plain.gpus(8), engine.gpus(8), engine.gpus(0), pair.gpus(8), pair.gpus(0)] == [0, 1, 0, 2, 2]
    assert [each.is_of(["one_gpu"]) for each in (plain, engine, pair)] == [False, True, False]


def imported_at_import(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names
