"""Files as people have them: colours, pipes, cut archives, deep JSON; and consoles that know ASCII only."""

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.tools.diagnose.diagnose import Diagnosis, diagnose
from harness.tools.diagnose.log_lines import check_readable, raw_lines

REPOSITORY = Path(__file__).resolve().parents[3]
ERROR = "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=194"
SLUG = "tms-cumemcreate-oom"


def slug(found: Diagnosis) -> str:
    return found.finding.entry.slug if found.finding else found.verdict


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_encoding_is_to_be_converted(encoding: str, tmp_path: Path) -> None:
    log, data = tmp_path / "a.log", f"epoch 1\r\n{ERROR}\r\n".encode(encoding)
    for content in (data, gzip.compress(data)):
        log.write_bytes(content)
        with pytest.raises(ValueError, match=f"{log} is not text in UTF-8; unpack"):
            check_readable([str(log)])


@pytest.mark.parametrize("name", ["a.log", "a.json", "a.jsonl", "a.json.gz", "a.gz"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_content_and_not_the_name_says_how_a_file_is_packed(name: str, packed: bool, tmp_path: Path) -> None:
    texts = [f"all is well, caf\u00e9\n{ERROR}\n"]
    if ".json" in name:
        texts = [json.dumps({"log": f"started\n{ERROR}"}) + "\n"]
    if name.startswith("a.json") and name != "a.jsonl":
        texts.append(json.dumps({"log": f"started\n{ERROR}"}, indent=1))
    for text in texts:
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if packed else data)
        check_readable([str(tmp_path / name)])
        assert slug(diagnose([str(tmp_path / name)])) == SLUG


DEEP = "[" * 100_000 + "]" * 100_000
ROW = json.dumps({"log": ERROR}) + "\n"
TEXTS = {
    "a.json with a value in each line": json.dumps({"log": "started"})
    + "\n"
    + json.dumps({"log": f"x\n{ERROR}"})
    + "\n",
    "a.jsonl with deep JSON": f"{DEEP}\n{ROW}",
    "a.json with deep JSON": f"{DEEP}\n{ROW}",
    "a.jsonl of structlog": json.dumps({"event": ERROR, "level": "error"}) + "\n",
    "a.log of logrotate with copytruncate, which begins with zeros": "\0" * 3 + f"{ERROR}\nstep 2\n",
    "a.log with more zeros": "\0" * 1000 + f"{ERROR}\nstep 2\n",
    "a.log with zeros for more than a piece": "\0" * 200_000 + f"{ERROR}\nstep 2\n",
    "a.log coloured by grep": ERROR.replace("error", "\x1b[01;31m\x1b[Kerror\x1b[m\x1b[K").replace(
        "func=", "func=\x1b[1;35m"
    ),
    "a.log pasted, without the escape characters": ERROR.replace("cu_mem_create", "[35mcu_mem_create[0m"),
    "a.log with a title": f"\x1b]0;title\x07\x1b[2K\r{ERROR}",
}
"""Name of a file and what it is -> what it holds."""


@pytest.mark.parametrize("kind", TEXTS)
def test_the_error_is_read_from(kind: str, tmp_path: Path) -> None:
    file = tmp_path / kind.split()[0]
    file.write_text(TEXTS[kind])
    check_readable([str(file)])
    found = diagnose([str(file)]).finding
    assert found and found.entry.slug == SLUG and ERROR in found.line.whole


def test_a_packed_file_without_a_byte_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match="is empty"):
        check_readable([str(tmp_path / "a.log.gz")])


def test_a_coloured_traceback_of_python(tmp_path: Path) -> None:
    frame = '  File \x1b[35m"/x/sglang/srt/managers/scheduler.py"\x1b[0m, line \x1b[35m7\x1b[0m, in \x1b[35mresume_memory_occupation\x1b[0m'
    text = f"Traceback (most recent call last):\n{frame}\n\x1b[1;35mKeyError\x1b[0m: \x1b[35m'weights'\x1b[0m\n"
    (tmp_path / "a.log").write_text(text)
    assert slug(diagnose([str(tmp_path / "a.log")])) == "double-resume-or-release"


def test_a_cut_archive_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = "".join(f"step {number} {os.urandom(40).hex()}\n" for number in range(5000))
    whole = gzip.compress(f"{ERROR}\n{noise}".encode())
    (tmp_path / "a.log.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.log.gz").write_bytes(whole[: len(whole) // 2] + b"\0" * 1000)
    for name in ("a", "b"):
        assert slug(diagnose([str(tmp_path / f"{name}.log.gz")])) == SLUG


def launch(*arguments: str, **values: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch" / "diagnose.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, **values)  # type: ignore[call-overload,no-any-return]


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(f"{ERROR}\n".encode())), daemon=True)
    writer.start()
    run = launch(str(pipe), timeout=60)
    assert run.returncode == 0 and run.stdout.startswith(f"known as {SLUG}: "), run.stderr
    writer.join()


def test_a_console_that_knows_ascii_only(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("RuntimeError: caf\u00e9 \u2588\n", encoding="utf-8")
    run = launch(str(tmp_path / "a.log"), env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert run.returncode == 1 and "RuntimeError: caf\\xe9" in run.stdout, run.stderr


def test_a_table_within_a_table_is_not_taken_apart(tmp_path: Path) -> None:
    rows = [{"message": "RuntimeError: outer"}, {"jobs": {"message": "RuntimeError: inner"}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [line.decode().rstrip() for _, line in raw_lines(str(tmp_path / "a.jsonl"))] == [
        "RuntimeError: outer",
        json.dumps(rows[1]),
    ]


def test_standard_input_may_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(f"{ERROR}\n".encode()))))
    monkeypatch.setattr(sys, "stdin", given)
    assert slug(diagnose(["-"])) == SLUG


@pytest.mark.parametrize("name", ["c-json.log", "a.jsonl", "a.txt"])
def test_a_table_in_each_line_is_read_in_any_file(name: str, tmp_path: Path) -> None:
    """As Docker's json-file driver and JSON loggers write them. A banner may stand before them."""
    trace = ["Traceback (most recent call last):", '  File "/app/reward.py", line 7, in score', "reward.BadAnswer: 7"]
    lost = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:38032 gloo"
    docker = [json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "T"}) for line in (*trace, lost)]
    logger = [json.dumps({"level": "error", "msg": text}) for text in ("\n".join(trace), lost)]
    for rows in (docker, logger):
        (tmp_path / name).write_text("\n".join(["starting sglang", *rows, ""]))
        found = diagnose([str(tmp_path / name)])
        assert found.verdict == "unknown" and found.suspicious and found.suspicious.text == "reward.BadAnswer: 7"
