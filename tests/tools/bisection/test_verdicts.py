"""What counts as bad, from outside: the command line over folders that were made before, so that nothing is installed."""

import re
import sys
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench

GOOD, BROKEN = "", "raise_here = True"
USE = "import moving\nif getattr(moving, 'raise_here', False): raise ValueError('the sync broke')"
FAIL = "import moving\nmoving.work()"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_first_bad_release_of_sixteen_in_six_runs(bench: Bench) -> None:
    run = bench.over_sites([GOOD] * 11 + [BROKEN] * 5, USE)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 1.11; the last good one is 1.10." in run.stdout
    assert len(bench.ran()) == len(set(bench.ran())) <= 6
    report = bench.report()
    assert "| moving | 1.10 | 1.11 | likely suspect |" in report and "ValueError: the sync broke" in report
    assert "<h2>Verdicts</h2>" in (bench.folder / "found" / "report.html").read_text()
    again = bench.bisect("--resume", "found")
    assert again.returncode == 0 and "The first bad release is 1.11" in again.stdout and len(bench.ran()) <= 6


@pytest.mark.long
def test_the_first_good_release(bench: Bench) -> None:
    run = bench.over_sites([BROKEN] * 5 + [GOOD] * 7, USE, "--find-fix")
    assert run.returncode == 0 and "The first good release is 1.5; the last bad one is 1.4." in run.stdout


@pytest.mark.long
def test_skips_hide_the_edge_and_the_answer_is_a_set(bench: Bench) -> None:
    codes = ["code = 0"] * 5 + ["code = 125"] * 3 + ["code = 3"] * 4
    run = bench.over_sites(codes, "import moving, sys; sys.exit(moving.code)")
    assert run.returncode == 1 and "The first bad release is one of 4: 1.5, 1.6, 1.7, 1.8." in run.stdout


@pytest.mark.long
def test_a_failure_that_another_one_masks_over_ten_releases(bench: Bench) -> None:
    other, wanted = "def work(): raise KeyError('weights')", "def work(): raise ValueError('log-prob is off')"
    run = bench.over_sites(["def work(): pass"] * 6 + [other] * 10 + [wanted] * 5, FAIL, "--match", "log-?prob is off")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "one of 11: 1.6, 1.7" in run.stdout
    assert "Another failure masks it in 10: 1.6, 1.7" in run.stdout and "KeyError: 'weights'" in run.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            "def work(): raise RuntimeError('The size of tensor a (8) must match')",
            "def work(): raise RuntimeError('CUDA error: an illegal memory access')",
            "--match 'RuntimeError: CUDA error: an illegal memory access' looks",
        ),
        (
            "def work(): raise RuntimeError('it is out of order')",
            "def work(): inner()\ndef inner(): raise RuntimeError('it is out of order')",
            "it is out of order (in moving/__init__.py:inner)",
        ),
    ],
    ids=["one class", "one message from two places"],
)
def test_two_causes_are_both_named_where_any_failure_counts(bench: Bench, first: str, second: str, said: str) -> None:
    run = bench.over_sites(["def work(): pass"] * 2 + [first] * 3 + [second] * 3, FAIL)
    assert run.returncode == 3, run.stdout + run.stderr
    assert "There are two causes" in run.stdout and "The first bad release is 1.2" in run.stdout
    assert "own failure is first seen at 1.5: " in run.stdout and said in run.stdout, run.stdout
    assert "First failure of 1.2" in bench.report() and "First failure of 1.5" in bench.report()


@pytest.mark.long
def test_one_cause_in_other_words_is_one_and_both_are_shown(bench: Bench) -> None:
    codes = [f"def work(): raise RuntimeError('weight {minor} of the layer is missing')" for minor in range(2)]
    codes += ["def work(): raise RuntimeError('weight 9 of this layer is missing')"] * 2
    run = bench.over_sites(["def work(): pass"] * 2 + codes, FAIL)
    assert run.returncode == 0 and "The first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    assert "The bad end 1.5 fails with other words" in run.stdout and "weight 9 of this" in run.stdout


@pytest.mark.long
def test_a_second_edge_is_said_instead_of_one_being_named(bench: Bench) -> None:
    codes = [GOOD] * 3 + [BROKEN] * 3 + [GOOD] * 8 + [BROKEN] * 6
    run = bench.over_sites(codes, USE, "--second-look", "20")
    assert run.returncode == 3, run.stdout + run.stderr
    assert "3 places where the verdict changes" in run.stdout
    for first in ("first bad release is 1.3", "first good release is 1.6", "first bad release is 1.14"):
        assert first in run.stdout


@pytest.mark.long
def test_a_number_decides_whatever_the_exit_code(bench: Bench) -> None:
    script = "import moving, json\nprint('logprob_diff = 1e-7'); print('logprob_diff =', moving.off)\nif moving.off > 1: raise OSError"
    codes = ["off = 2e-7"] * 4 + ["off = 0.02"] * 2 + ["off = 3.0"] * 3
    run = bench.over_sites(codes, script, "--metric", "logprob_diff", "--above", "0.01")
    assert run.returncode == 0 and "The first bad release is 1.4" in run.stdout, run.stdout + run.stderr
    assert "logprob_diff = 0.02" in bench.report()


def test_a_number_is_compared_with_the_good_end(bench: Bench) -> None:
    script = (
        "import moving, json, os\n"
        "with open(os.environ['BISECT_METRICS'], 'a') as f:\n"
        "    for each in (9.0, moving.s, moving.s): f.write(json.dumps({'seconds': each}) + '\\n')"
    )
    codes = ["s = 1.0", "s = 1.02", "s = 1.28", "s = 1.31", "s = 1.32", "s = 1.4"]
    run = bench.over_sites(codes, script, "--metric", "step_seconds", "--worse", "1.3x")
    assert run.returncode == 0 and "The first bad release is 1.3;" in run.stdout, run.stdout + run.stderr
    assert "step_seconds is bad above 1.3, 1.3 times the good end's 1." in run.stdout
    larger = re.search(r"over the limit \(1.2 to 1.3, 1.28 to 1.31\) is not the largest, which is (.*)", run.stdout)
    assert larger and "to 1.2, " in larger[1]
    rows = re.findall(r"^\| (1\.\d) \| (good|bad) \| \d \| step_seconds = ([\d.]+), ", bench.report(), re.MULTILINE)
    assert rows == sorted(rows) and ("1.3", "bad", "1.31") in rows


def test_a_hang_counts_and_nothing_of_it_is_left(bench: Bench) -> None:
    mark = f"bisect-hang-{bench.folder.name}"
    script = (
        "import moving, subprocess, sys, time\n"
        f"if moving.hangs: subprocess.Popen(['sleep', '1000.5', ], start_new_session=True, env={{'MARK': {mark!r}}})\n"
        "time.sleep(1000 if moving.hangs else 0)\n"
        "sys.exit(moving.code)"
    )
    codes = ["hangs, code = False, 0"] * 3 + ["hangs, code = False, 1"] + ["hangs, code = True, 0"] * 2
    run = bench.over_sites(codes, script, "--hang", "--timeout", "1s")
    assert run.returncode == 1 and "one of 2: 1.3, 1.4" in run.stdout, run.stdout + run.stderr
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
    # One in three, by a counter in place of chance: the test must not be flaky itself.
    script = (
        "import moving, pathlib, sys\n"
        "file = pathlib.Path('count'); number = int(file.read_text()) if file.exists() else 0\n"
        "file.write_text(str(number + 1))\n"
        "sys.exit(moving.flaky and number % 3 == 2)"
    )
    run = bench.over_sites(["flaky = 0"] * 7 + ["flaky = 1"] * 6, script, "--repeat", "6", "--confirm", "44")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 1.7;" in run.stdout
    stated = re.search(r"right with a probability of ([\d.]+)%.* failed in (\d+) of (\d+) runs", run.stdout)
    assert stated and float(stated[1]) >= 95 and 0.25 < int(stated[2]) / int(stated[3]) < 0.5
    ran = {record["name"]: len(record["attempts"]) for record in bench.state()["records"]}
    assert ran["1.6"] > 6 and ran["1.12"] > 6 and all(ran[name] <= 6 for name in ran if name not in ("1.6", "1.12"))


def test_a_script_that_wants_to_stop_pauses_and_is_gone_on_from(bench: Bench) -> None:
    script = "import moving, sys, os\nsys.exit(200 if not os.path.exists('calm') else moving.code)"
    run = bench.over_sites(["code = 0"] * 2 + ["code = 1"] * 2, script)
    assert run.returncode == 4 and "exit code 200" in run.stderr and "--resume" in run.stderr
    (bench.folder / "calm").touch()
    run = bench.bisect("--resume", "found")
    assert run.returncode == 0 and "The first bad release is 1.2" in run.stdout, run.stdout + run.stderr


def test_only_a_failure_is_probed(bench: Bench) -> None:
    """A run that is good shows that the package can be imported, and so does a traceback of its functions."""
    codes = [GOOD] * 5 + ["import nothing_of_this_name"] * 3 + ["def work(): raise KeyError('a')"] * 6
    run = bench.over_sites(codes, "import moving\nif hasattr(moving, 'work'): moving.work()")
    assert run.returncode == 1 and "is one of 4: 1.5, 1.6, 1.7, 1.8." in run.stdout, run.stdout + run.stderr
    probed = {file.stem for file in (bench.folder / "found" / "probes").glob("*.log")}
    assert probed == {"1.5", "1.6", "1.7"}
    assert "cannot run here, the probe fails: ModuleNotFoundError" in bench.report()


def test_status_log_and_replay(bench: Bench) -> None:
    run = bench.over_sites([GOOD] * 3 + [BROKEN] * 2, USE)
    assert run.returncode == 0
    status = bench.bisect("status", "found")
    assert status.returncode == 0 and "The first bad release is 1.3" in status.stdout
    log = bench.bisect("log", "found").stdout + "good 1.99\n"
    (bench.folder / "log.txt").write_text("\n".join(line for line in log.splitlines() if " 1.3 " not in line))
    before = len(bench.ran())
    replayed = bench.bisect("replay", "log.txt")
    assert replayed.returncode == 0 and "The first bad release is 1.3" in replayed.stdout, (
        replayed.stdout + replayed.stderr
    )
    assert "good 1.99 is left out: it is no candidate" in replayed.stdout
    assert "1.3" in bench.ran()[before:] and len(bench.ran()) - before <= 2


@pytest.mark.long
def test_release_without_a_gpu_is_no_bad_one(bench: Bench) -> None:
    no_driver = "def work(): raise RuntimeError('Found no NVIDIA driver on your system.')"
    codes = ["def work(): pass"] * 3 + [no_driver] * 2 + ["def work(): raise ValueError('b')"] * 3
    bench.environment["PATH"] = "/usr/bin:/bin"  # without nvidia-smi, where that is elsewhere
    run = bench.over_sites(codes, FAIL)
    assert run.returncode == 1 and "one of 3: 1.3, 1.4, 1.5" in run.stdout, run.stdout + run.stderr
    assert "cannot run here: RuntimeError: Found no NVIDIA driver" in bench.report()


@pytest.mark.long
def test_an_end_that_cannot_be_judged_here_gives_way_to_the_next_one(bench: Bench) -> None:
    codes = ["code = 125"] * 3 + ["code = 0"] * 4 + ["code = 1"] * 5 + ["code = 125"] * 2
    run = bench.over_sites(codes, "import moving, sys; sys.exit(moving.code)")
    assert run.returncode == 0 and "The first bad release is 1.7" in run.stdout, run.stdout + run.stderr
    assert "the good end 1.3, in place of 1.0 (cannot run here" in run.stdout
    assert "the bad end 1.11, in place of 1.13 (cannot run here" in run.stdout


@pytest.mark.long
def test_a_port_that_is_taken_for_a_moment_does_not_count(bench: Bench) -> None:
    script = (
        "import moving, os, sys\n"
        "if os.environ['BISECT_CANDIDATE'] == '1.2' and not os.path.exists('freed'):\n"
        "    open('freed', 'w'); raise OSError(98, 'Address already in use')\n"
        "sys.exit(moving.code)"
    )
    run = bench.over_sites(["code = 0"] * 3 + ["code = 1"] * 2, script)
    assert run.returncode == 0 and "The first bad release is 1.3; the last good one is 1.2." in run.stdout
    assert "1.2: once more, as this may pass: OSError: [Errno 98] Address already in use" in run.stdout
