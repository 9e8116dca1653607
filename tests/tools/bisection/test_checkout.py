"""Scripts of this checkout find harness in the environment of a candidate, which has none installed."""

from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import REPOSITORY, Bench, bare_python

IMPORTS = Path(__file__).with_name("import_harness.py")


def test_a_script_of_this_checkout_imports_harness_in_a_bare_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bench = Bench(tmp_path)
    sites = bench.sites(["code = 0", "code = 1"])
    asked = ["--python", bare_python(), "--package", "moving", "--environments", str(sites), "--dir", "found"]
    run = bench.bisect(*asked, "--good", "1.0", "--bad", "1.1", "--", str(IMPORTS))
    assert run.returncode == 0 and "The first bad release is 1.1; the last good one is 1.0." in run.stdout, run.stdout
    assert "SystemExit" not in run.stdout and "1 in harness" in (tmp_path / "found/runs/1.1/1/log.txt").read_text()
    assert f"PYTHONPATH={sites}/1.1:{REPOSITORY} " in bench.report()


def test_a_package_that_is_not_sglang_is_tested_in_the_users_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang is installed here, and there may be no GPU, but the question is not about it."""
    bench = Bench(tmp_path)
    code = "import os, sys\nsys.exit('TORCHDYNAMO_DISABLE' in os.environ or os.environ.get('SGLANG_USE_CPU_ENGINE') == '1')"
    sites = bench.sites(["", "x = 1"])
    asked = ["--package", "moving", "--environments", str(sites), "--dir", "found", "--good", "1.0", "--bad", "1.1"]
    for name in ("TORCHDYNAMO_DISABLE", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    run = bench.bisect(*asked, "--", bench.script(code + "\n" + "import moving"))
    assert run.returncode == 2 and "the bad end 1.1 is not bad" in run.stderr, run.stdout + run.stderr
