"""Tracebacks in logs: of one process and of several, chained, grouped, ignored, cut off, and crashes below Python."""

import subprocess
import sys

import pytest

from harness.tools.diagnose.tracebacks import Frame, Traceback, first_cause, log_line, log_lines, tracebacks_in


def read(text: str) -> list[Traceback]:
    return list(tracebacks_in(log_lines(text)))


def first(text: str) -> str:
    found = first_cause(read(text))
    return found.exception if found else ""


def printed_by(code: str) -> str:
    """Return what Python prints for a program that fails."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


def traceback(error: str, prefix: str = "") -> str:
    frames = '  File "x.py", line 1, in f\n    raise KeyError("no: colon") if Wrong: x\n    ^^^^^\n'
    return f"{prefix}Traceback (most recent call last):\n{frames}{error}\n"


HIT = "[2026-11-20 22:04:42 TP1] Scheduler hit an exception: "
CHAINED = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
INTERLEAVED = """\
Traceback (most recent call last):
[2026-11-20 22:04:42 TP0] Load weight end.
Traceback (most recent call last):
  File "a.py", line 1, in f
Capturing batches (bs=1): 100%
UserWarning: old
[2026-11-20 22:04:42] WARNING: x
/lib/x.py:53: UserWarning: y
  File "b.py", line 1, in f
ValueError: mine
RuntimeError: the other's
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("\n  \n", ""),
        ("loading\nout of luck\n\n", ""),
        (traceback("ValueError: a: b"), "ValueError: a: b"),
        (traceback("torch.OutOfMemoryError: CUDA.", HIT) + "bye\n", "torch.OutOfMemoryError: CUDA."),
        (traceback("AssertionError"), "AssertionError"),
        (traceback("KeyboardInterrupt"), "KeyboardInterrupt"),
        (traceback("_queue.Empty"), "_queue.Empty"),
        (traceback("torch._dynamo.exc.Unsupported: call"), "torch._dynamo.exc.Unsupported: call"),
        (traceback("harness.weights.verify.WeightsDidNotArrive: x"), "harness.weights.verify.WeightsDidNotArrive: x"),
        (traceback("pkg.LaunchError:\n  two\n  lines"), "pkg.LaunchError:"),
        (traceback("ray.exceptions.RayTaskError(ValueError): x"), "ray.exceptions.RayTaskError(ValueError): x"),
        (traceback("KeyError: 'w'") + CHAINED + traceback("RuntimeError: cannot load"), "KeyError: 'w'"),
        (traceback("OSError: disk") + CAUSED + traceback("RuntimeError: cannot load"), "OSError: disk"),
        (traceback("ValueError: 1", HIT) + traceback("EOFError", "[2026-11-20 22:04:43 TP0] "), "ValueError: 1"),
        (INTERLEAVED, "ValueError: mine"),
        ("Exception ignored in: <f at 0x7f>\n" + traceback("TypeError: x") + traceback("OSError: y"), "OSError: y"),
        ("Exception ignored on calling ctypes callback function: <f>\n" + traceback("TypeError: x"), ""),
        (traceback("").rstrip() + "\nKilled by the kernel", ""),
        ("[2026-11-21 22:03:12] Using custom SIGQUIT handler: <function ignore_signal at 0x7f>\n", ""),
        (traceback("Loading: 50%\n[2026-11-21 22:03:12 TP0] Prefill: 1 token\nDone\nOSError: x"), "OSError: x"),
        (traceback("pkg.OldWarning: y\npkg.NotFound: z"), "pkg.NotFound: z"),
        ("terminate called after throwing an instance of 'X'\n  what():  CUDA\n",
         "terminate called after throwing an instance of 'X'"),
    ],
)  # fmt: skip
def test_the_first_error_of_a_log(log: str, error: str) -> None:
    assert first(log) == error


def test_what_a_traceback_has() -> None:
    text = f"loading\n{traceback('ValueError: a: b', '[rank3]: ')}".replace("\n  ", "\n[rank3]:   ")
    (found,) = read(text.replace("\nValue", "\n[rank3]: Value"))
    assert (found.process, found.begins, found.ends, found.exception) == ("rank3", 2, 6, "ValueError: a: b")
    assert found.frames == [Frame("x.py", 1, "f", 'raise KeyError("no: colon") if Wrong: x')]
    assert found.lines[0] == "[rank3]: Traceback (most recent call last):" and found.lines[-1] == "ValueError: a: b"
    assert found.has_header and not found.is_ignored and not found.is_crash


def test_a_real_chain_has_the_cause_first() -> None:
    text = printed_by("try:\n    {}['w']\nexcept KeyError as e:\n    raise RuntimeError('cannot load') from e")
    cause, effect = read(text)
    assert (cause.exception, effect.exception) == ("KeyError: 'w'", "RuntimeError: cannot load")
    assert first_cause([cause, effect]) is cause


GROUP = """
def fail():
    raise TypeError("inner")
try:
    fail()
except TypeError as error:
    raise ExceptionGroup("several", [ValueError("one"), error, ExceptionGroup("more", [OSError("disk")])])
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought exception groups")
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "(Worker pid=7) "])
def test_the_members_of_a_real_exception_group(prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in printed_by(GROUP).splitlines())
    assert [(each.exception, [frame.function for frame in each.frames]) for each in read(text)] == [
        ("TypeError: inner", ["<module>", "fail"]),  # the cause of the group
        ("ExceptionGroup: several (3 sub-exceptions)", ["<module>"]),
        ("TypeError: inner", ["<module>", "fail"]),
    ]
    assert first(text) == "TypeError: inner"


def test_a_group_is_the_first_cause_only_without_a_member() -> None:
    lines = ["  + Exception Group Traceback (most recent call last):", '  |   File "x.py", line 1, in f', "  |     g()"]
    lines += ["  | ExceptionGroup: both (1 sub-exception)", "  +-+---------------- 1 ----------------"]
    member = ["    | Traceback (most recent call last):", '    |   File "y.py", line 1, in g', "    | OSError: disk"]
    assert first("\n".join([HIT + lines[0], *lines[1:], "ready"])) == "ExceptionGroup: both (1 sub-exception)"
    assert first("\n".join([HIT + lines[0], *lines[1:], *member, "ready"])) == "OSError: disk"


def test_lines_of_several_processes_alternate() -> None:
    """A line without a prefix does not end a traceback whose lines have one."""
    one, other = ([f"[{name}]: {line}" for line in traceback(f"ValueError: of {name}").splitlines()]
                  for name in ("rank0", "rank1"))  # fmt: skip
    lines = [line for pair in zip(one, other, strict=True) for line in pair]
    lines.insert(6, "RuntimeError: of a process without a prefix")
    assert [(each.process, each.exception, len(each.frames)) for each in read("\n".join(lines))] == [
        ("rank0", "ValueError: of rank0", 1),
        ("rank1", "ValueError: of rank1", 1),
    ]


def test_ray_puts_its_prefix_before_every_line_and_sglang_before_the_first() -> None:
    lines = [f"(WorkerDict pid=3) {line}" for line in (HIT + traceback("ValueError: x")).splitlines()]
    (found,) = read("\n".join(lines))
    assert (found.process, found.exception, len(found.frames)) == ("WorkerDict pid=3 TP1", "ValueError: x", 1)


INDENTED = [f"    {line}" for line in traceback("ValueError: x").splitlines()]


@pytest.mark.parametrize(
    ("lines", "has_header"),
    [
        (INDENTED, True),
        (INDENTED[1:], False),  # quoted
        (traceback("ValueError: x").splitlines()[1:], False),
    ],
)
def test_a_traceback_that_is_indented_or_quoted(lines: list[str], has_header: bool) -> None:
    (found,) = read("\n".join(["callback failed", *lines, "ready"]))
    assert (found.exception, len(found.frames)) == ("ValueError: x", 1)
    assert (found.has_header, found.begins) == (has_header, 2)


@pytest.mark.parametrize("after", ["", "step 1\n" * 500])
def test_a_traceback_that_is_cut_off(after: str) -> None:
    (found,) = read(traceback("").rstrip() + "\n" + after)
    assert (found.begins, found.ends, found.exception, len(found.frames)) == (1, 0, "", 1)


def test_a_real_crash_below_python() -> None:
    code = "import ctypes, faulthandler\nfaulthandler.enable()\ndef f():\n    ctypes.string_at(0)\nf()"
    (found,) = read(printed_by(code))
    assert found.is_crash and found.exception == "Fatal Python error: Segmentation fault"
    assert [each.function for each in found.frames] == ["<module>", "f", "string_at"]


def test_the_crashed_thread_among_others() -> None:
    text = """\
Fatal Python error: Aborted

Thread 0x00007f01 (most recent call first):
  File "waiting.py", line 1 in wait

Current thread 0x00007f02 (most recent call first):
  File "a.py", line 2 in g
  File "a.py", line 1 in f

Thread 0x00007f03 (most recent call first):
  File "other.py", line 1 in h

Extension modules: numpy (total: 81)
"""
    (found,) = read(text)
    assert [(each.file, each.line, each.function) for each in found.frames] == [("a.py", 1, "f"), ("a.py", 2, "g")]


@pytest.mark.parametrize(
    ("line", "text", "process"),
    [
        ("(WorkerDict pid=1, ip=10.0.0.1) [rank3]: KeyError: 1", "KeyError: 1", "WorkerDict pid=1, ip=10.0.0.1 rank3"),
        ("[2025-11-21 05:44:00 DP0 TP1] ValueError", "ValueError", "DP0 TP1"),
        ("\x1b[31m2025-11-21T05:44:00.1Z stderr F x\x1b[0m", "x", ""),
        ("[rank7]:[E1121 05:44:00.1 ProcessGroupNCCL.cpp:632] [Rank 7] x", "[Rank 7] x", "rank7"),
        ("(EngineCore_1 pid=1) ERROR 07-13 10:41:52 [core.py:588] x", "x", "EngineCore_1 pid=1"),
        ("(VllmWorker rank=0 pid=12) ERROR 05-01 11:11:11 [multiproc.py:522] x", "x", "VllmWorker rank=0 pid=12"),
        ("(Worker pid=854) ERROR 06-28 14:00:48 worker_base.py:148]   File x", "  File x", "Worker pid=854"),
        ("(raylet) [2025-04-02 15:02:00,117 E 135 135] (raylet) node_manager.cc:3069: x", "x", "raylet"),
        ("2025-07-01 11:11:11.123 | ERROR    | slime.utils:run:12 - x", "x", ""),
        ("2025-07-01 11:11:11,123 ERROR worker.py:12 -- x", "x", ""),
        ("[2025-07-01 11:11:11,123][verl][ERROR] - x", "x", ""),
        ("[2025-07-01 11:11:11,123] [ERROR] [launch.py:12:main] x", "x", ""),
        ("[0]: KeyError: 1", "KeyError: 1", "0"),
        ("[1,3]<stderr>: KeyError: 1", "KeyError: 1", "3"),
        ("[2025-11-21 05:44:00 MOE_DP0 TP1] x", "x", "MOE_DP0 TP1"),
        ("[12-16 14:27:08] x", "x", ""),
        ("2025-11-21T05:44:00.1Z stderr F     raise x", "    raise x", ""),
        ("rank 1 FAILED: EngineFailed: x", "EngineFailed: x", "rank 1"),
        ("[  12.5 s] x", "x", ""),
        ("  File x", "  File x", ""),
    ],
)
def test_prefixes_are_taken_off(line: str, text: str, process: str) -> None:
    found = log_line(1, line)
    assert (found.text, found.process) == (text, process)


def test_what_the_resource_tracker_prints_is_no_cause() -> None:
    """A real one, which is asked to forget a name that it never learned, and goes on."""
    code = "from multiprocessing import resource_tracker as each; each.unregister('/sgl_shm_mq_7', 'shared_memory')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KeyError: '/sgl_shm_mq_7'" in done.stderr
    log = (
        f'{done.stderr}Traceback (most recent call last):\n  File "x.py", line 1, in f\nOSError: [Errno 24] Too many\n'
    )
    first = first_cause(tracebacks_in(log_lines(log)))
    assert first and first.exception == "OSError: [Errno 24] Too many"
