"""Any log: known failures through every prefix and noise, unrelated ones never named, real reports."""

import gzip
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.tools.diagnose.diagnose import Diagnosis, diagnose
from harness.tools.diagnose.diagnosis_text import as_text
from harness.tools.diagnose.entries import catalogue
from harness.tools.diagnose.log_lines import log_files
from harness.tools.diagnose.symptoms import MOST_TEXTS, read_facts

REPOSITORY = Path(__file__).resolve().parents[3]
LOGS = Path(__file__).with_name("logs")
REPORTS = tomllib.loads((LOGS / "reported.toml").read_text(encoding="utf-8"))["reports"]
UNRELATED = sorted((LOGS / "unrelated").glob("*.log"))
ENTRIES = [entry for entry in catalogue().values() if entry.context]
"""Those of SGLang and of trainers: in their logs a special entry may have the sentence of a general one."""

PREFIXES: dict[str, Callable[[str], str]] = {
    "ray": lambda line: f"\x1b[36m(WorkerDict pid=123, ip=10.0.0.1)\x1b[0m {line}",
    "ray_repeated": lambda line: f"(WorkerDict pid=123) {line} [repeated 7x across cluster]",
    "torchrun": lambda line: f"[rank0]: {line}",
    "ray_torchrun": lambda line: f"(TaskRunner pid=9) [rank3]: {line}",
    "kubernetes": lambda line: f"2025-11-21T05:44:03.123456789Z stdout F {line}",
    "logging": lambda line: f"2025-11-21 05:44:03,123 - {line}",
    "srun": lambda line: f"12: {line}",
    "compose": lambda line: f"worker-1  | {line}",
    "pasted": lambda line: f"[36m(WorkerDict pid=123)[0m {line}",
}
NOISE = (
    "[2025-11-21 05:44:00 TP1] Decode batch. #running-req: 4, #token: 20480, token usage: 0.13, cuda graph: True",
    "(TaskRunner pid=1) step:3 - actor/entropy:0.41 - critic/score/mean:0.2 - errors:0",
    'INFO:     10.0.0.1:5000 - "POST /generate HTTP/1.1" 200 OK',
    "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:01,  2.04it/s]",
    "/usr/lib/python3/torch/library.py:356: UserWarning: overriding a previously registered kernel",
    "[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
    "",
    "[rank2]:[W1121 05:44:00.1 ProcessGroupNCCL.cpp:4718] Warning: using GPU 2 to perform barrier",
    "wandb: Syncing run colocated-7b",
    "\ufffd\ufffd \u2588\u2588\u2588 100%",
)
CONSEQUENCES = (
    "[2025-11-21 05:44:02] Received sigquit from a child process. It usually means the child failed.",
    "(WorkerDict pid=92) RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:38032",
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "ray.exceptions.RayTaskError(RuntimeError): ray::WorkerDict.generate_sequences()",
)


def diagnosed(folder: Path, text: str, name: str = "a.log") -> Diagnosis:
    (folder / name).write_text(text, encoding="utf-8")
    return diagnose([str(folder / name)])


def slug(found: Diagnosis) -> str:
    return found.finding.entry.slug if found.finding else found.verdict


@pytest.mark.parametrize("number", range(len(ENTRIES)), ids=lambda number: ENTRIES[number].slug)
def test_an_example_is_known_behind_prefixes_among_noise_and_consequences(number: int, tmp_path: Path) -> None:
    entry = ENTRIES[number]
    around = [*NOISE, *([] if entry.consequence else CONSEQUENCES), *NOISE]
    for index, example in enumerate(entry.examples):
        prefix = list(PREFIXES.values())[(number + index) % len(PREFIXES)]  # each entry one, each prefix several
        lines = [prefix(line) for line in example["log"].splitlines()]
        assert slug(diagnosed(tmp_path, "\n".join([*around, *lines, *around]))) == entry.slug


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_traceback_is_known_behind_each_prefix(prefix: str, tmp_path: Path) -> None:
    lines = [PREFIXES[prefix](line) for line in catalogue()["port-collision-same-seed"].examples[0]["log"].splitlines()]
    assert slug(diagnosed(tmp_path, "\n".join(lines))) == "port-collision-same-seed"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_noise_never_changes_the_slug(data: st.DataObject, tmp_path: Path) -> None:
    entry = data.draw(st.sampled_from(ENTRIES))
    lines = data.draw(st.sampled_from(entry.examples))["log"].splitlines()
    before = slug(diagnosed(tmp_path, "\n".join(lines)))
    for noise in data.draw(st.lists(st.sampled_from(NOISE), max_size=60)):
        # Not below a frame's code: Python writes it together with the exception that follows.
        places = [at for at in range(len(lines) + 1) if not at or not lines[at - 1].startswith("    ")]
        lines.insert(data.draw(st.sampled_from(places)), noise)
    assert slug(diagnosed(tmp_path, "\n".join(lines))) == before == entry.slug


OF_OTHER_PROGRAMS = {
    "multiprocessing_without_guard": "missing-main-guard",
    "nginx_address_in_use": "address-in-use",
    "signal_in_streamlit_thread": "signal-outside-main-thread",
    "uvicorn_address_in_use": "address-in-use",
}


@pytest.mark.parametrize("name", OF_OTHER_PROGRAMS)
def test_a_failure_only_looks_like_a_sentence_of_every_program(name: str) -> None:
    finding = diagnose([str(LOGS / "other_programs" / f"{name}.log")]).finding
    assert finding and (finding.entry.slug, finding.is_known) == (OF_OTHER_PROGRAMS[name], False)


@pytest.mark.parametrize("file", UNRELATED, ids=lambda file: file.stem)
def test_an_unrelated_failure_is_unknown(file: Path) -> None:
    found = diagnose([str(file)])
    assert found.verdict == "unknown"
    assert found.suspicious and found.suspicious.whole.strip()


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["url"].removeprefix("https://github.com/"))
def test_a_public_report(report: dict[str, str], tmp_path: Path) -> None:
    assert slug(diagnosed(tmp_path, report["log"])) == report["slug"]


def test_noise_alone_is_no_failure(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, "\n".join(NOISE * 20)).verdict == "no failure"


def test_the_earliest_cause_wins(tmp_path: Path) -> None:
    first = "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=194"
    second = "TypeError: ServerArgs.__init__() got an unexpected keyword argument 'x'"
    assert slug(diagnosed(tmp_path, f"{first}\n{second}")) == "tms-cumemcreate-oom"
    found = diagnosed(tmp_path, f"{second}\n{first}")
    assert slug(found) == "unknown-engine-argument"
    assert [each.entry.slug for each in found.others] == ["tms-cumemcreate-oom"]


def test_a_decisive_line_does_not_lose_to_the_number_of_its_consequences(tmp_path: Path) -> None:
    frame = '  File "/x/sglang/srt/managers/scheduler.py", line 7, in resume_memory_occupation\n'
    cause = f"Traceback (most recent call last):\n{frame}KeyError: 'kv_cache'\n"
    consequence = 'Traceback (most recent call last):\n  File "/x/aiohttp/client.py", line {0}, in connect\n'
    consequence += "aiohttp.ClientConnectorError: Cannot connect to host 10.0.0.1:{0}\n"
    found = diagnosed(tmp_path, cause + "".join(consequence.format(30000 + number) for number in range(1000)))
    assert found.finding and (slug(found), found.finding.is_known) == ("double-resume-or-release", True)
    assert found.ending and found.ending.text.endswith(":30999")


def test_consequences_that_all_differ_take_no_room(tmp_path: Path) -> None:
    cause = "(WorkerDict pid=1) RuntimeError: Cannot pause allocation that is not active\n"
    names = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(4 * MOST_TEXTS))
    text = "".join(f"aiohttp.ClientConnectorError: Cannot connect to host {name}\n" for name in names)
    found = diagnosed(tmp_path, f"{text}{cause}{text}")
    assert found.finding and (slug(found), found.finding.is_known) == ("double-resume-or-release", True)
    assert len(read_facts([str(tmp_path / "a.log")]).symptoms) < 2 * MOST_TEXTS


def test_an_unknown_error_line_before_a_consequence_is_shown_with_it(tmp_path: Path) -> None:
    error = "gpu4:22:27 [3] transport.cc:49 NCCL WARN Cuda failure 'invalid device context'"
    found = diagnosed(tmp_path, f"{error}\nRuntimeError: Connection closed by peer [10.0.0.2]:38032 gloo\n")
    assert slug(found) == "peer-vanished" and found.suspicious and found.suspicious.whole == error
    assert "perhaps from the line before it" in as_text(found)


def test_an_exception_that_nobody_knows_is_not_hidden_by_its_consequence(tmp_path: Path) -> None:
    text = "\n".join(
        ["sglang", *CONSEQUENCES[:2], "Traceback (most recent call last):", "mine.Broken: no", CONSEQUENCES[3]]
    )
    found = diagnosed(tmp_path, text)
    assert found.verdict == "unknown"
    assert found.suspicious and found.suspicious.text == "mine.Broken: no"
    assert "peer-vanished" in [each.entry.slug for each in found.others]


def test_after_an_unknown_exception_nothing_is_known_for_sure(tmp_path: Path) -> None:
    cause = "AssertionError: dp_size must be 1 or dp attention must be enabled for update weights from tensor"
    before = diagnosed(tmp_path, cause).finding
    after = diagnosed(tmp_path, f"ZeroDivisionError: division by zero\n{cause}").finding
    assert before and after and (before.is_known, after.is_known) == (True, False)


def test_gzip_invalid_utf8_and_long_lines(tmp_path: Path) -> None:
    line = b"\xff\xfe [torch_memory_saver.cpp] CUresult error: 2 (out of memory) func=cu_mem_create\n"
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"x" * 300_000 + b"\n" + line))
    found = diagnose([str(tmp_path / "a.log.gz")])
    assert slug(found) == "tms-cumemcreate-oom"
    assert found.finding and found.finding.line.number == 2


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [
        ("2026-01-01T12:00:00+09:00", "2026-01-01T04:00:00Z", "ours"),
        ("2026-01-01T12:00:00.5+0900", "2026-01-01T02:00:00.25-01:00", "theirs"),
        ("2026-01-01 04:00:01", "2026-01-01 04:00:00", "theirs"),
        ("2026-01-01 04:00:01", "2026-01-01T04:00:00Z", "ours"),  # not comparable: the order of the files
    ],
)
def test_of_two_files_the_earlier_failure_is_first_in_any_time_zone(
    ours: str, theirs: str, first: str, tmp_path: Path
) -> None:
    names = {"ours": ours, "theirs": theirs}
    for name, stamp in names.items():
        (tmp_path / f"{name}.log").write_text(f"{stamp} ERROR {name} broke\n")
    found = diagnose([str(tmp_path / f"{name}.log") for name in names])
    assert found.suspicious and found.suspicious.text.endswith(f"{first} broke")


def test_the_time_for_a_long_line_grows_with_its_length_alone(tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        diagnosed(tmp_path, "NCCL WARN " * count)
        return time.process_time() - began

    assert seconds(8_000) < 16 * max(seconds(1_000), 0.02)


def test_a_run_directory(tmp_path: Path) -> None:
    for name in ("engines", "events"):
        (tmp_path / name).mkdir()
    failed = {
        "time": 1.0,
        "rank": 1,
        "event": "failed",
        "error": "RuntimeError: Connection closed by peer [::1]:9 gloo",
    }
    (tmp_path / "events" / "rank1.jsonl").write_text(json.dumps(failed) + "\n")
    (tmp_path / "engines" / "engine-rank0.log").write_text("sglang\nKeyError: 'weights', in resume_memory_occupation\n")
    assert log_files([str(tmp_path)])[0].endswith("engine-rank0.log")
    found = diagnose(log_files([str(tmp_path)]))
    assert slug(found) == "double-resume-or-release"
    assert [each.entry.slug for each in found.others] == ["peer-vanished"]


def test_the_lines_of_one_json_value_are_all_read(tmp_path: Path) -> None:
    said = ["FIRST FAILURE: rank 1 on vm was killed by SIGKILL", "RuntimeError: Connection closed by peer [::1]:9 gloo"]
    found = diagnosed(tmp_path, json.dumps({"text": "\n".join(said)}), "failure-vm.json")
    assert found.verdict == "unknown" and found.suspicious and found.suspicious.text == said[0]


def test_a_traceback_in_our_events_is_read_line_by_line(tmp_path: Path) -> None:
    error = "WeightsRefused: lm_head.weight: a parameter of the engine that nothing sent would fill"
    event = {"time": 1.0, "rank": 0, "event": "failed", "error": error, "traceback": f"Traceback\n  File\n{error}"}
    assert slug(diagnosed(tmp_path, json.dumps(event) + "\n", "rank0.jsonl")) == "tied-embeddings"


def launch(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch" / "diagnose.py"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=REPOSITORY)


def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        "ok\nAssertionError: dp_size must be 1 or dp attention must be enabled for update weights from tensor\n"
    )
    run = launch(str(log))
    assert run.returncode == 0 and run.stdout.startswith("known as dp-attention-update: ")
    assert f"{log}:2: AssertionError: dp_size" in run.stdout
    values = json.loads(launch(str(log), "--json").stdout)
    assert (values["verdict"], values["slug"], values["evidence"][0]["line"]) == ("known", "dp-attention-update", 2)
    unknown = launch("-", given="ZeroDivisionError: division by zero\n")
    assert unknown.returncode == 1 and "-:1: ZeroDivisionError" in unknown.stdout
    assert launch("-", given="all is well\n").returncode == 3
    missing = launch(str(tmp_path / "none.log"))
    assert missing.returncode == 2 and len(missing.stderr.splitlines()) == 1
    (tmp_path / "empty").mkdir()
    assert launch(str(tmp_path / "empty")).returncode == 2


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"\x12\x34\0\0\x01{}", "is not text in UTF-8")])
def test_what_is_no_log_is_refused_in_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(content)
    command = [sys.executable, str(REPOSITORY / "launch" / "diagnose.py")]
    for name, text in ((str(tmp_path / "a.log"), b""), ("-", content)):
        run = subprocess.run([*command, name], input=text, capture_output=True, cwd=REPOSITORY)
        assert run.returncode == 2 and said in run.stderr.decode() and len(run.stderr.splitlines()) == 1


def test_the_time_to_read_a_log_grows_with_its_length_alone(tmp_path: Path) -> None:
    """Compare two lengths, as the seconds themselves depend on the machine: about 2 s for 10 MB of these lines."""
    decisive = "AssertionError: dp_size must be 1 or dp attention must be enabled for update weights from tensor\n"

    def seconds_to_read(repeats: int) -> float:
        log = tmp_path / f"{repeats}.log"
        log.write_text(("\n".join(NOISE) + "\n") * repeats + decisive)
        started = time.process_time()
        assert slug(diagnose([str(log)])) == "dp-attention-update"
        return time.process_time() - started

    assert seconds_to_read(12_000) < 10 * seconds_to_read(3_000)
