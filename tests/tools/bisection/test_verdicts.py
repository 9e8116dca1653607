"""What counts as bad, from outside: the command line over folders that were made before, so that nothing is
installed."""

import re
import sys
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench, bare_python

GOOD, BROKEN = "", "raise_here = True"
USE = "import moving\nif getattr(moving, 'raise_here', False): raise ValueError('the sync broke')"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_first_bad_release_of_eight_in_five_runs(bench: Bench) -> None:
    run = bench.over_sites([GOOD] * 5 + [BROKEN] * 3, USE)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 1.5; the last good one is 1.4." in run.stdout
    assert len(bench.ran()) == len(set(bench.ran())) <= 5
    report = bench.report()
    assert "| moving | 1.4 | 1.5 |" in report and "ValueError: the sync broke" in report
    again = bench.bisect("--resume", "found")
    assert again.returncode == 0 and "The first bad release is 1.5" in again.stdout and len(bench.ran()) <= 5
    for version in bench.ran():
        imported = f"moving is {bench.folder / 'sites' / version / 'moving' / '__init__.py'}"
        assert imported in run.stdout and imported in report


def test_two_bare_asserts_of_one_script_are_two_causes(bench: Bench) -> None:
    script = "import moving\nassert moving.size == 1\nassert moving.name == 'a'"
    codes = ["size, name = 1, 'a'", "size, name = 2, 'a'", "size, name = 1, 'b'"]
    run = bench.over_sites(codes, script)
    assert run.returncode == 3 and "There are two causes" in run.stdout, run.stdout + run.stderr
    assert "script.py:<module>: assert moving.size == 1" in run.stdout
    assert "script.py:<module>: assert moving.name == 'a'" in run.stdout


def test_a_local_build_is_its_release_and_an_unknown_version_is_none(bench: Bench) -> None:
    sites = bench.sites(["code = 0", "code = 0", "code = 1", "code = 1"])
    for minor, version in enumerate(("1.0+cpu", "unknown", "1.2.0+cu128", "1.3")):
        metadata = sites / f"1.{minor}" / f"moving-1.{minor}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: moving\nVersion: {version}\n")
    asked = ["--package", "moving", "--environments", "sites", "--good", "1.0", "--bad", "1.3", "--dir", "found"]
    run = bench.bisect(
        *asked, "--python", bare_python(), "--", bench.script("import moving, sys; sys.exit(moving.code)")
    )
    assert run.returncode == 1 and "is one of 2: 1.1, 1.2." in run.stdout, run.stdout + run.stderr
    assert "SKIP  1.1: cannot be installed: its environment has moving unknown" in run.stdout


@pytest.mark.long
def test_a_hang_counts_and_nothing_of_it_is_left(bench: Bench) -> None:
    mark = f"bisect-hang-{bench.folder.name}"
    script = (
        "import moving, subprocess, sys, time\n"
        f"if moving.hangs: subprocess.Popen(['sleep', '1000.5', ], start_new_session=True, env={{'MARK': {mark!r}}})\n"
        "time.sleep(1000 if moving.hangs else 0)\n"
        "sys.exit(moving.code)"
    )
    codes = ["hangs, code = False, 0"] * 2 + ["hangs, code = False, 1"] + ["hangs, code = True, 0"]
    run = bench.over_sites(codes, script, "--hang", "--timeout", "5s")
    assert run.returncode == 1 and "one of 2: 1.2, 1.3" in run.stdout, run.stdout + run.stderr
    hung = next(record for record in bench.state()["records"] if record["attempts"][0]["timed_out"])
    log = (bench.folder / "found" / hung["attempts"][0]["log"]).read_text()
    assert "(script.py:" in log or not Path(sys.executable).with_name("py-spy").exists()  # where it hung, by py-spy
    left = [p for p in Path("/proc").glob("[0-9]*/environ") if mark.encode() in readable(p)]
    assert not left


def readable(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.long
def test_a_flaky_failure_is_found_with_repeat_and_its_confidence_said(bench: Bench) -> None:
    # One in two, by a counter in place of chance: the test must not be flaky itself.
    script = (
        "import moving, pathlib, sys\n"
        "file = pathlib.Path('count'); number = int(file.read_text()) if file.exists() else 0\n"
        "file.write_text(str(number + 1))\n"
        "sys.exit(moving.flaky and number % 2)"
    )
    run = bench.over_sites(["flaky = 0"] * 2 + ["flaky = 1"] * 2, script, "--repeat", "4", "--confirm", "30")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 1.2;" in run.stdout
    stated = re.search(r"right with a probability of ([\d.]+)%.* failed in (\d+) of (\d+) runs", run.stdout)
    assert stated and float(stated[1]) >= 95 and 0.3 < int(stated[2]) / int(stated[3]) < 0.7
    ran = {record["name"]: len(record["attempts"]) for record in bench.state()["records"]}
    assert ran["1.1"] > 4 and ran["1.3"] > 4 and all(ran[name] <= 4 for name in ran if name not in ("1.1", "1.3"))


def test_a_release_that_cannot_be_imported_is_skipped_and_not_bad(bench: Bench) -> None:
    codes = [GOOD] * 2 + ["import nothing_of_this_name"] * 2 + ["def work(): raise KeyError('a')"] * 2
    script = "import moving\nif hasattr(moving, 'work'): moving.work()"
    run = bench.over_sites(codes, script)
    assert run.returncode == 1 and "is one of 3: 1.2, 1.3, 1.4." in run.stdout, run.stdout + run.stderr
    assert "cannot be imported (--match counts that too): ModuleNotFoundError" in bench.report()
    assert "```\n```" not in bench.report(), "nothing is in an empty block"


def test_a_failed_import_can_be_looked_for(bench: Bench) -> None:
    secret = "hf_" + "x" * 24
    run = bench.over_sites([GOOD, f"raise ValueError('{secret}')"], "import moving")
    assert run.returncode == 2 and "(--match counts that too)" in run.stderr, run.stdout + run.stderr
    assert secret not in run.stderr and "[redacted " in run.stderr
    words = ["--environments", "sites", "--package", "moving", "--good", "1.0", "--bad", "1.1", "--match", "ValueError"]
    run = bench.bisect("--python", bare_python(), *words, "--dir", "again", "--", "script.py")
    assert run.returncode == 0 and "The first bad release is 1.1;" in run.stdout, run.stdout + run.stderr


def test_a_package_that_is_not_sglang_is_tested_in_the_users_own_environment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang is installed here, and there may be no GPU, but the question is not about it."""
    code = "import os, sys\nsys.exit('TORCHDYNAMO_DISABLE' in os.environ or os.environ.get('SGLANG_USE_CPU_ENGINE') == '1')"
    sites = bench.sites(["", "x = 1"])
    asked = ["--package", "moving", "--environments", str(sites), "--dir", "found", "--good", "1.0", "--bad", "1.1"]
    for name in ("TORCHDYNAMO_DISABLE", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    run = bench.bisect(*asked, "--", bench.script(code + "\n" + "import moving"))
    assert run.returncode == 2 and "the bad end 1.1 is not bad" in run.stderr, run.stdout + run.stderr
