"""Do pieces of work in forked processes, each in one of its own: what it leaves behind, such as a process group, ends
with it.
"""

import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working

T = TypeVar("T")


class Told(Exception):
    """An exception whose sentence says all that there is to know, so that no traceback of it is printed."""


class ForkEnded(Exception):
    """The process of a job ended without an answer. Something killed it, perhaps the kernel when memory ran out."""

    def __init__(self, number: int, code: int | None) -> None:
        super().__init__(f"the process of job {number} ended with exit code {code} before it answered")
        self.number, self.code = number, code


def in_forks(
    work: Callable[..., T], jobs: Mapping[int, tuple[Any, ...]], processes: int, what: str = "parts"
) -> dict[int, T]:
    """Return what work returns for the arguments of each job, so many of them at the same time.

    A line says how many are done, if it takes long. what: the jobs' name there. Raise what work raises, for the first
    job that fails, and ForkEnded.
    """
    fork = multiprocessing.get_context("fork")
    waiting, found = sorted(jobs), dict[int, T]()
    running: dict[Any, tuple[int, Any]] = {}  # the reading end of its pipe -> the job and its process
    with working("") as progress:
        try:
            while waiting or running:
                progress.what = f"building {what}: {len(found)} of {len(jobs)} done"
                while waiting and len(running) < processes:
                    number = waiting.pop(0)
                    reader, writer = fork.Pipe(duplex=False)
                    child = fork.Process(target=_answer, args=(writer, work, jobs[number]), daemon=True)
                    child.start()
                    writer.close()
                    running[reader] = number, child
                for ready in wait(list(running)):
                    number, child = running.pop(ready)
                    found[number] = _answer_of(ready, number, child)
        finally:
            for _, child in running.values():
                child.kill()
    return found


def _answer(writer: Connection, work: Callable[..., Any], job: tuple[Any, ...]) -> None:
    """Send what work returns, or what it raises; the traceback goes to standard error, unless a sentence says all."""
    try:
        answer: tuple[Any, Exception | None] = work(*job), None
    except Exception as error:  # of whatever kind: it is raised again where the answer is waited for
        if isinstance(error, Told | UnsupportedEnvironment):
            _name_place(error)
        else:
            traceback.print_exc()
        answer = None, error
    try:
        writer.send(answer)
    except Exception as error:  # an exception of another package need not be picklable
        writer.send((None, RuntimeError(f"{answer[1] or error}")))


def _name_place(error: Exception) -> None:
    """Have a sentence say where its cause was raised: the last line of SGLang's that it passed.

    A cause without words of its own, such as an assert, is told by the line that raised it.
    """
    cause = error.__cause__
    if cause is None:
        return
    frames = traceback.extract_tb(cause.__traceback__)
    is_told = bool(str(cause).strip())
    for frame in [each for each in frames if "/sglang/srt/" in each.filename or not is_told][-1:]:
        file = frame.filename.rpartition("site-packages/")[2]
        error.args = (f"{str(error).rstrip(': ')} at {file}:{frame.lineno}" + ("" if is_told else f": {frame.line}"),)


def _answer_of(reader: Any, number: int, child: Any) -> Any:
    try:
        answer, error = reader.recv()  # from our own fork, through a pipe that has no name
    except EOFError:
        child.join()
        raise ForkEnded(number, child.exitcode) from None
    child.join()
    if error is not None:
        raise error
    return answer
