import subprocess
import sys

import pytest

from harness.rollout.processes import first_error


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
SEGMENTATION = """\
ok
Fatal Python error: Segmentation fault

Thread 0x7f (most recent call first):
  File "a.py", line 1 in f

Extension modules: numpy (total: 81)
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
        (traceback("[2026-11-20 22:04:42 TP1] RuntimeError: x"), "RuntimeError: x"),
        (traceback("KeyError: 'w'") + CHAINED + traceback("RuntimeError: cannot load"), "KeyError: 'w'"),
        (traceback("OSError: disk") + CAUSED + traceback("RuntimeError: cannot load"), "OSError: disk"),
        (traceback("ValueError: 1", HIT) + traceback("EOFError", "[2026-11-20 22:04:43 TP0] "), "ValueError: 1"),
        (INTERLEAVED, "ValueError: mine"),
        ("Exception ignored in: <f at 0x7f>\n" + traceback("TypeError: x") + traceback("OSError: y"), "OSError: y"),
        (SEGMENTATION, "Fatal Python error: Segmentation fault"),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA\n",
         "terminate called after throwing an instance of 'c10::Error'"),
        (traceback("").rstrip() + "\nKilled by the kernel", ""),
        ("[2026-11-21 22:03:12] Using custom SIGQUIT handler: <function ignore_signal at 0x7f>\n", ""),
        (traceback("Loading: 50%\n[2026-11-21 22:03:12 TP0] Prefill: 1 token\nDone\nOSError: x"), "OSError: x"),
        (traceback("pkg.OldWarning: y\npkg.NotFound: z"), "pkg.NotFound: z"),
    ],
)  # fmt: skip
def test_first_error(log: str, error: str) -> None:
    assert first_error(log) == error


def test_first_error_of_a_real_chain() -> None:
    code = "try:\n    {}['w']\nexcept KeyError as e:\n    raise RuntimeError('cannot load') from e"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "RuntimeError: cannot load" in done.stderr
    assert first_error(done.stderr) == "KeyError: 'w'"
