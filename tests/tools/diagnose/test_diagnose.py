"""Any log: known failures through every prefix and noise, failures far apart, several files, run directories."""

import gzip
import json
import subprocess
import sys
import time
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
WRITTEN = Path(__file__).with_name("corpus") / "written"
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
USER = "Traceback (most recent call last):\n  File \"/app/my_reward.py\", line 31, in score\nKeyError: 'answer'\n"
OWN_ERROR = "RuntimeError: Cannot pause allocation that is not active\n"
REFUSED = (
    'Traceback (most recent call last):\n  File "/x/aiohttp/client.py", line {0}, in connect\n'
    "aiohttp.ClientConnectorError: Cannot connect to host 10.0.0.1:{0}\n"
)
HEALTHY = f"{NOISE[0]}\n"


def diagnosed(folder: Path, text: str, name: str = "a.log") -> Diagnosis:
    (folder / name).write_text(text, encoding="utf-8")
    return diagnose([str(folder / name)])


def slug(found: Diagnosis) -> str:
    return found.finding.entry.slug if found.finding else found.verdict


def is_named(found: Diagnosis, name: str, known: bool) -> bool:
    return found.finding is not None and (slug(found), found.finding.is_known) == (name, known)


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


def test_noise_alone_is_no_failure(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, "\n".join(NOISE * 20)).verdict == "no failure"


ALIKE = [file for file in WRITTEN.glob("alike_*.log") if "_in_sglang" not in file.name]


@pytest.mark.parametrize("file", ALIKE, ids=lambda file: file.stem)
def test_an_exception_before_a_sentence_of_every_program_is_the_likelier_cause(file: Path, tmp_path: Path) -> None:
    text, name = file.read_text(encoding="utf-8"), slug(diagnose([str(file)]))
    for same in (f"vllm\n{text}", f"{text}{USER}"):
        assert is_named(diagnosed(tmp_path, same), name, known=False)
    assert slug(diagnosed(tmp_path, f"{USER}{text}")) == "unknown"


def test_an_error_that_was_survived_is_not_what_ended_the_log(tmp_path: Path) -> None:
    own, far = "double-resume-or-release", HEALTHY * 300
    near = diagnosed(tmp_path, f"{OWN_ERROR}{HEALTHY * 20}{USER}")
    assert is_named(near, own, known=True) and near.ending and near.ending.text == "KeyError: 'answer'"
    survived = diagnosed(tmp_path, f"{OWN_ERROR}{far}{USER}")
    assert survived.verdict == "unknown" and survived.suspicious and survived.suspicious.text == "KeyError: 'answer'"
    assert f"seen as well: {own}" in as_text(survived)
    # Failures in between connect it with the end, and a consequence that nobody knows is none that ended the log.
    for text in (f"{OWN_ERROR}{HEALTHY * 150}{CONSEQUENCES[1]}\n{HEALTHY * 150}{USER}", OWN_ERROR + far + REFUSED):
        assert is_named(diagnosed(tmp_path, text), own, known=True)


def test_a_line_nearby_counts_however_often_it_stood_before(tmp_path: Path) -> None:
    done = "in resume_memory_occupation: done\n"
    text = f"sglang\n{done * 500}{HEALTHY * 300}{done}KeyError: 'kv_cache'\n"
    assert is_named(diagnosed(tmp_path, text), "double-resume-or-release", known=True)


def test_an_injected_fault_may_come_long_after_the_line_that_asks_for_it(tmp_path: Path) -> None:
    text = (WRITTEN / "injected_command_before.log").read_text(encoding="utf-8").replace("\n", f"\n{HEALTHY * 400}", 1)
    assert is_named(diagnosed(tmp_path, text), "injected-fault", known=True)


def test_a_program_of_any_name_is_the_runs_if_its_launcher_names_the_pid(tmp_path: Path) -> None:
    killed = (WRITTEN / "kernel_java.log").read_text(encoding="utf-8").splitlines()[1]
    (tmp_path / "dmesg.log").write_text(f"{killed}\n")
    for pid, named in ((4242, "host-out-of-memory"), (77, "unknown")):
        (tmp_path / "a.log").write_text(f"{HEALTHY}failed (exitcode: -9) local_rank: 0 (pid: {pid}) of binary: java\n")
        assert slug(diagnose([str(tmp_path / "a.log"), str(tmp_path / "dmesg.log")])) == named


def test_a_later_file_may_show_that_the_run_went_on(tmp_path: Path) -> None:
    steps = [f"2026-11-21 05:4{number}:30 step {number}: loss=0.3\n" for number in range(6)]
    (tmp_path / "engine.log").write_text(f"2026-11-21 05:44:00 {OWN_ERROR}")
    for count, went_on in ((5, False), (6, True)):
        (tmp_path / "trainer.log").write_text("".join(steps[:count]))
        found = diagnose([str(tmp_path / "engine.log"), str(tmp_path / "trainer.log")])
        assert slug(found) == "double-resume-or-release" and bool(found.went_on) is went_on


def test_a_decisive_line_does_not_lose_to_the_number_of_its_consequences(tmp_path: Path) -> None:
    frame = '  File "/x/sglang/srt/managers/scheduler.py", line 7, in resume_memory_occupation\n'
    cause = f"Traceback (most recent call last):\n{frame}KeyError: 'kv_cache'\n"
    found = diagnosed(tmp_path, cause + "".join(REFUSED.format(30000 + number) for number in range(1000)))
    assert is_named(found, "double-resume-or-release", known=True)
    assert found.ending and found.ending.text.endswith(":30999")


def test_consequences_that_all_differ_take_no_room(tmp_path: Path) -> None:
    names = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(4 * MOST_TEXTS))
    text = "".join(f"aiohttp.ClientConnectorError: Cannot connect to host {name}\n" for name in names)
    found = diagnosed(tmp_path, f"{text}(WorkerDict pid=1) {OWN_ERROR}{text}")
    assert is_named(found, "double-resume-or-release", known=True)
    assert len(read_facts([str(tmp_path / "a.log")]).symptoms) < 2 * MOST_TEXTS


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


def test_the_lines_of_a_json_value_are_all_read(tmp_path: Path) -> None:
    said = ["FIRST FAILURE: rank 1 on vm was killed by SIGKILL", "RuntimeError: Connection closed by peer [::1]:9 gloo"]
    found = diagnosed(tmp_path, json.dumps({"text": "\n".join(said)}), "failure-vm.json")
    assert found.verdict == "unknown" and found.suspicious and found.suspicious.text == said[0]
    error = "WeightsRefused: lm_head.weight: a parameter of the engine that nothing sent would fill"
    event = {"time": 1.0, "rank": 0, "event": "failed", "error": error, "traceback": f"Traceback\n  File\n{error}"}
    assert slug(diagnosed(tmp_path, json.dumps(event) + "\n", "rank0.jsonl")) == "tied-embeddings"
    injected = {"time": 1.0, "rank": 1, "host": "vm", "event": "injected", "fault": "kill@sync:1:1"}
    assert slug(diagnosed(tmp_path, f"{json.dumps(injected)}\n{said[0]}\n")) == "injected-fault"


def launch(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch" / "diagnose.py"), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, cwd=REPOSITORY)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


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
    unknown = launch("-", given=b"ZeroDivisionError: division by zero\n")
    assert unknown.returncode == 1 and "-:1: ZeroDivisionError" in unknown.stdout
    assert launch("-", given=b"all is well\n").returncode == 3
    (tmp_path / "empty").mkdir()
    for missing in ("none.log", "empty"):
        run = launch(str(tmp_path / missing))
        assert run.returncode == 2 and len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"\x12\x34\0\0\x01{}", "is not text in UTF-8")])
def test_what_is_no_log_is_refused_in_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(content)
    for run in (launch(str(tmp_path / "a.log")), launch("-", given=content)):
        assert run.returncode == 2 and said in run.stderr and len(run.stderr.splitlines()) == 1


def test_the_time_to_read_a_log_grows_with_its_length_alone(tmp_path: Path) -> None:
    """Compare two lengths, as the seconds themselves depend on the machine: about 2 s for 10 MB of these lines."""

    def seconds(text: str) -> float:
        (tmp_path / "long.log").write_text(text)
        started = time.process_time()
        diagnose([str(tmp_path / "long.log")])
        return time.process_time() - started

    assert seconds("NCCL WARN " * 8_000) < 16 * max(seconds("NCCL WARN " * 1_000), 0.02)
    noise = "\n".join([*NOISE, ""])
    assert seconds(noise * 12_000 + OWN_ERROR) < 10 * seconds(noise * 3_000 + OWN_ERROR)
