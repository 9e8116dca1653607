"""Real runs: each broken variant fails in the known way, and its control passes.

By default those that need no process; test_command.py and test_run_cases.py run the quickest of the others.
"""

import importlib.metadata
import os
import resource
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement

from harness.runtime.errors import CANNOT
from harness.runtime.fork_server import ForkServer
from harness.tools.hosts import kernel
from harness.tools.repro import run_cases
from harness.tools.repro.case import Case, Variant, all_cases
from harness.tools.repro.cases.engine_start_and_end import NOBODY
from harness.tools.repro.cases.payloads import SHARED_TENSORS
from harness.tools.repro.run_cases import judge, run_case, sharing_imports
from harness.tools.trial.trial import Outcome, judge_words

REPOSITORY = Path(__file__).resolve().parents[3]
QUICK = ("cpu-payload-authkey", "illegal-cuda-visible-devices", "missing-main-guard")
"""Those of test_command.py and test_run_cases.py."""
HERE = (
    "hf-router-masking",
    "lost-correction-bias",
    "safe-unpickler",
    "tied-embeddings",
    "unknown-engine-argument",
    "verl-engine-removed",
)
"""Those without processes of their own."""
NOT_HERE = {
    "hf-router-masking": "both variants pass",  # fixed in the transformers that this sglang takes
}
ALONE = ("no-room-for-kv-cache",)
"""Those that fail where another program gives back memory meanwhile, as other tests do."""
ENGINES = ("orphans-of-a-start", "stale-cache-after-pause")
"""Of those with engines; the others run with `launch/repro.py run --all --needs cpu`."""
NO_GPU = [
    slug
    for slug, case in all_cases().items()
    if case.needs in ("cpu", "hosts")
    and not case.release
    and slug not in (*QUICK, *HERE, *ALONE)
    and (slug in ENGINES or not case.engine)
]
"""But for those that install a release of SGLang, each a gigabyte or more."""
TRUE_SIZE = [slug for slug in NO_GPU if all_cases()[slug].program.__module__.endswith("true_size")]


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def may_open_enough_files() -> bool:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * SHARED_TENSORS


def may_become_nobody() -> bool:
    """Not the root of a user namespace that has one user."""
    change = f"import os; os.geteuid() or os.setresuid({NOBODY}, {NOBODY}, {NOBODY})"
    return subprocess.run([sys.executable, "-c", change], capture_output=True, timeout=60).returncode == 0


NEEDED_OF_THIS_HOST: dict[str, Callable[[], bool]] = {
    "ipv6-dist-init-addr": has_ipv6_loopback,
    "too-many-open-files": may_open_enough_files,
    "too-many-processes": may_become_nobody,
}
"""What a case needs besides its fields, and without which it says that it cannot run here."""


def is_installed(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def may_be_impossible_here(case: Case) -> bool:
    """Whether there is a reason, found here and not by the case, for which it may say that it cannot run."""
    needs = NEEDED_OF_THIS_HOST.get(case.slug)
    return (
        bool(case.release)  # installed at the first use, from an index that this host may not reach
        or (case.needs == "hosts" and bool(kernel.refusal()))
        or not all(map(is_installed, map(Requirement, (*case.requires, *(["sglang"] if case.engine else [])))))
        or (needs is not None and not needs())
    )


def check(slug: str) -> None:
    """As a user runs it."""
    command = [sys.executable, str(REPOSITORY / "launch" / "repro.py"), "run", slug]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * all_cases()[slug].timeout_seconds + 60)
    expected = 125 if CANNOT in ended.stdout else 0 if slug in NOT_HERE else 1
    assert ended.returncode == expected, ended.stdout + ended.stderr
    check_verdict(slug, ended.stdout + ended.stderr, ended.stdout)


@contextmanager
def as_from_a_shell() -> Iterator[None]:
    """Take away pytest's variable, which differs in each test: a fork server serves one environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        yield


def check_forked(slug: str, server: ForkServer | None, capfd: pytest.CaptureFixture[str]) -> None:
    """The same without a Python of its own: the server forks the variants. There is none where there are GPUs."""
    if not server:
        return check(slug)
    with as_from_a_shell(), pytest.MonkeyPatch.context() as patch:
        patch.delattr(run_cases, "run_tree")  # by which a variant is started that cannot be forked
        run_case(all_cases()[slug], [], server)
    printed = capfd.readouterr()
    check_verdict(slug, printed.out + printed.err, printed.out)


def check_verdict(slug: str, all_printed: str, printed: str) -> None:
    last = printed.rstrip().rpartition("\n")[2]
    if last.startswith(CANNOT) and may_be_impossible_here(all_cases()[slug]):
        pytest.skip(last)
    expected = "not reproduced: " if slug in NOT_HERE else "reproduced: "
    assert last.startswith(expected) and NOT_HERE.get(slug, "") in last, all_printed


@pytest.mark.parametrize("slug", HERE)
def test_here(slug: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    outcomes = []
    for variant in get_args(Variant):
        try:
            all_cases()[slug].program(variant == "broken")
            code = 0
        except Exception:
            traceback.print_exc()
            code = 1
        printed = capfd.readouterr()
        words = all_cases()[slug].signature
        verdict, reason = judge_words(words, printed.out + printed.err, code, f"exit code {code}")
        outcomes.append(Outcome(code=code, timed_out=False, seconds=1.0, verdict=verdict, log="", reason=reason))
    kind, sentence = judge(*outcomes)
    assert kind == ("not reproduced" if slug in NOT_HERE else "reproduced"), outcomes
    assert NOT_HERE.get(slug, "") in sentence


ON_A_CPU = [slug for slug in NO_GPU if slug not in TRUE_SIZE]
FORKED = [slug for slug in ON_A_CPU if all_cases()[slug].needs == "cpu" and not all_cases()[slug].new_python]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer | None]:
    with ExitStack() as stack:
        with as_from_a_shell():
            found = stack.enter_context(sharing_imports([all_cases()[slug] for slug in FORKED], []))
        yield found


@pytest.mark.long
@pytest.mark.parametrize("slug", FORKED)
def test_on_a_cpu(slug: str, server: ForkServer | None, capfd: pytest.CaptureFixture[str]) -> None:
    check_forked(slug, server, capfd)


@pytest.mark.long
@pytest.mark.parametrize("slug", [slug for slug in ON_A_CPU if slug not in FORKED])
def test_on_a_cpu_in_a_new_python(slug: str) -> None:
    check(slug)
