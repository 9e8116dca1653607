"""MATH answers, compared by math-verify in a separate process: sympy may never finish with what a response contains.

math-verify's own timeouts are alarms. They work in the main thread alone, count time on the clock, and come late if one
long operation runs in C. Here the kernel ends the process after a number of CPU seconds, so that the load of the
machine changes no score.
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
"""Limit of the worker's address space."""


@dataclass(slots=True)
class MathWorker:
    """The process. It is started for the first answer, and again after an answer that ended it."""

    cpu_seconds: float = 5.0
    """Limit of one comparison, which usually takes milliseconds."""
    _process: subprocess.Popen[str] | None = None

    def reward(self, response: str, ground_truth: Any) -> float:
        """Return 1.0 if math-verify finds the ground truth, in LaTeX, in the response; otherwise, or after cpu_seconds,
        0.0.

        The rule of verl/utils/reward_score/math_verify.py. Raise RuntimeError if the process cannot work.
        """
        if self._process is None:
            command = [sys.executable, "-P", __file__, str(self.cpu_seconds)]
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
    """Answer each line of standard input, [response, ground truth] as JSON, with a line: 0.0 or 1.0."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable()  # math-verify warns that its timeouts are off
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
