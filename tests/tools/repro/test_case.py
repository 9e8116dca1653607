"""The cases and the catalogue of failures agree."""

import ast
from pathlib import Path

import pytest

from harness.tools.diagnose.entries import catalogue
from harness.tools.repro import cases
from harness.tools.repro.case import Case, UnknownCase, all_cases, find

CASES = all_cases()


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.slug)
def test_a_case_is_of_an_entry_and_is_sound(case: Case) -> None:
    assert case.title and case.signature
    assert not case.entry.no_case, f"{case.failure} says that it has no case, but {case.slug} is one"
    assert case.broken != case.healthy


@pytest.mark.parametrize("file", sorted(Path(cases.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_listing_cases_needs_no_torch(file: Path) -> None:
    imported = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in imported if "torch" in ast.unparse(node)]


@pytest.mark.parametrize("slug", catalogue())
def test_an_entry_has_a_case_or_says_why_not(slug: str) -> None:
    has_case = any(case.failure == slug for case in CASES.values())
    assert has_case or catalogue()[slug].no_case.endswith("."), f"{slug} has no case and does not say why"


def test_every_case_that_runs_without_a_gpu_was_seen() -> None:
    unseen = [
        slug
        for slug, case in CASES.items()
        if case.needs in ("cpu", "hosts")
        and not any(f"launch/repro.py run {slug}: " in seen.result for seen in case.entry.seen)
    ]
    assert unseen == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dsv3-qkv-splt", "did you mean dsv3-qkv-a-split"),
        ("quantization-scales", "is a known failure without a case: It needs a quantized checkpoint"),
    ],
)
def test_an_unknown_name_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(UnknownCase) as caught:
        find(name)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_failure_stands_for_all_of_its_cases() -> None:
    found = {case.slug for case in find("multinode-tp-init-timeout")}
    assert {"debian-hosts-file", "gloo-wrong-interface"} <= found
