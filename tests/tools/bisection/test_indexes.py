import json

import pytest
from packaging.version import Version

from harness.tools.bisection.candidates import Candidate, between, files_of_page, releases_of

PAGE = """<!DOCTYPE html><html><body>
<a href="https://files/sglang-0.5.9-py3-none-any.whl#sha256=aa" data-requires-python="&gt;=3.10" data-upload-time="2026-02-23T10:00:00Z">x</a>
<a href="sglang-0.5.9.tar.gz#sha256=bb" data-upload-time="2026-02-23T10:05:00Z">x</a>
<a href="sglang-0.5.10rc0-py3-none-any.whl">x</a>
<a href="sglang-0.5.10-py3-none-any.whl" data-yanked="broken">x</a>
<a href="sglang-0.5.10.post1-cp311-cp311-manylinux_2_34_x86_64.whl">x</a>
<a href="sglang-0.5.11-py3-none-any.whl">x</a> <a href="sglang_router-0.9-py3-none-any.whl">x</a> <a href="README">x</a>
</body></html>"""


def found() -> dict[Version, Candidate]:
    return releases_of("sglang", files_of_page(PAGE, is_json=False))


def test_a_page_in_html() -> None:
    releases = found()
    kept = [str(version) for version in sorted(releases) if not releases[version].yanked]
    assert kept == ["0.5.9", "0.5.10rc0", "0.5.10.post1", "0.5.11"] and releases[Version("0.5.10")].yanked
    assert releases[Version("0.5.9")].time == "2026-02-23T10:05:00Z"
    assert releases[Version("0.5.9")].requires_python == ">=3.10"


def test_a_page_in_json() -> None:
    file = {
        "filename": "a_b-1.0-py3-none-any.whl",
        "upload-time": "2026-01-01T00:00:00Z",
        "yanked": "bad",
        "url": "",
        "hashes": {},
    }
    [found] = releases_of("A.b", files_of_page(json.dumps({"files": [file]}), is_json=True)).values()
    assert (found.name, found.time, found.requires_python, found.yanked) == ("1.0", "2026-01-01T00:00:00Z", "", True)
    whole = [{"filename": "a_b-1.0-py3-none-any.whl", "yanked": True}, {"filename": "a_b-1.0.tar.gz"}]
    assert not releases_of("A.b", whole)[Version("1.0")].yanked  # yanked only when all its files are
    assert releases_of("A.b", whole[:1])[Version("1.0")].yanked


@pytest.mark.parametrize(
    ("older", "newer", "names"),
    [
        ("0.5.9", "0.5.11", ["0.5.9", "0.5.10.post1", "0.5.11"]),
        ("0.5.10", "0.5.11", ["0.5.10", "0.5.10.post1", "0.5.11"]),
        ("0.5.10rc0", "0.5.11", ["0.5.10rc0", "0.5.10.post1", "0.5.11"]),
    ],
    ids=["plain", "a yanked end", "a release candidate as an end"],
)
def test_what_is_between_two_ends(older: str, newer: str, names: list[str]) -> None:
    assert [each.name for each in between(found(), older, newer, "sglang")] == names


@pytest.mark.parametrize(
    ("older", "newer", "count"), [("2.9.0.dev1", "2.9.0.dev3", 3), ("2.8", "2.9.0.dev3", 4), ("2.8", "2.9", 2)]
)
def test_nightly_builds_are_tried_between_nightly_builds(older: str, newer: str, count: int) -> None:
    names = ["2.8", "2.9.0.dev1", "2.9.0.dev2", "2.9.0.dev3", "2.9"]
    assert len(between({Version(name): Candidate(name=name) for name in names}, older, newer, "torch")) == count
