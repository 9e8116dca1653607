"""Every case at a model's true size, one by one: what broke all their controls once broke none of the others.

A file of its own, because one worker takes a whole file. SGLang is imported once, in a server that forks the variants.
"""

import tempfile
from collections.abc import Iterator

import pytest

from harness.runtime.fork_server import ForkServer
from harness.tools.repro import shared_imports
from harness.tools.repro.run_cases import variant_environment
from tests.tools.repro.test_cases import TRUE_SIZE, as_from_a_shell, check, check_forked

FORKED = "tests.tools.repro.forked_at_true_size"
NEW_PYTHON = ("dsv3-fp8-tp32", "mtp-draft-stale")
"""One that runs launch/full_size.py and one that does not, as a user runs them: each variant in a Python of its own."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with as_from_a_shell():
        found = ForkServer.start([FORKED], variant_environment(tempfile.gettempdir(), []))
    yield found
    found.close()


@pytest.mark.parametrize("slug", NEW_PYTHON)
def test_a_case_as_a_user_runs_it(slug: str) -> None:
    check(slug)


@pytest.mark.parametrize("slug", [slug for slug in TRUE_SIZE if slug not in NEW_PYTHON])
def test_a_case_of_true_size(
    slug: str, server: ForkServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_imports, "may_fork", lambda *_: True)
    monkeypatch.setattr(
        shared_imports, "task_of", lambda case, variant: (f"{FORKED}:run_program", f"{case.slug}\0{variant}".encode())
    )
    check_forked(slug, server, capfd)
