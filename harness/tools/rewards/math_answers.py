"""MATH answers, compared by math-verify in a process of its own: what a response makes sympy compute may never end.

math-verify's own timeouts are alarms: of the main thread only, by the clock, and late where one long operation runs in C.
Here the kernel ends the worker once an answer has taken its CPU seconds, so that load changes no score.
"""

import json
import logging
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MEMORY_BYTES = 4 << 30
"""The worker's address space."""


@dataclass(slots=True)
class MathWorker:
    """The process, started for the first answer, and again after one that ended it."""

    cpu_seconds: float = 5.0
    """What one comparison may take; one takes milliseconds."""
    _process: subprocess.Popen[str] | None = None

    def reward(self, response: str, ground_truth: Any) -> float:
        """Return 1.0 if math-verify finds the ground truth, LaTeX, in the response, else 0.0; 0.0 after cpu_seconds too.

        As verl/utils/reward_score/math_verify.py. Raise RuntimeError where the process cannot work.
        """
        if self._process is None:
            command = [sys.executable, "-m", __name__, str(self.cpu_seconds)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = self._process
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([response, str(ground_truth)]) + "\n")
            process.stdin.flush()
        if answer := process.stdout.readline():
            return float(answer)
        self._process = None
        with suppress(BrokenPipeError):
            process.communicate()
        if process.returncode >= 0:
            raise RuntimeError(f"the process that compares MATH answers ended with code {process.returncode}")
        return 0.0


def main(cpu_seconds: float) -> None:
    """Answer lines of JSON, [response, ground truth], with a line each, 0.0 or 1.0, until there are no more."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable()  # a warning that the timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        response, ground_truth = json.loads(line)
        gold = parse(f"\\boxed{{{ground_truth}}}", (LatexExtractionConfig(),), parsing_timeout=None)
        found = parse(response, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
        print(float(verify(gold, found, timeout_seconds=None)), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(float(sys.argv[1]))
