"""What launch/bisect_versions.py was asked: a question, or one of the verbs about a bisect that is there."""

import os
import sys
import threading

from harness.config.cli import read_options
from harness.config.layers import ConfigError
from harness.runtime.errors import report_user_error
from harness.tools.bisection import session
from harness.tools.bisection.question import Options, WrongQuestion
from harness.tools.bisection.registry import NoNetwork

VERBS = {"status": session.status, "log": session.log, "replay": session.replay}


def main(arguments: list[str], description: str) -> int:
    """Returns the exit code. description: for --help."""
    code = _answer(arguments, description)
    if threading.active_count() > 1:  # installs that no answer needs any more: they end with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _answer(arguments: list[str], description: str) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:split], arguments[split + 1 :]
    try:
        if words and words[0] in VERBS:
            return VERBS[words[0]](words[1:])
        if words and words[0] == "judge":
            return session.judge_here(parse(words[1:], description), command)
        if "--resume" in words:
            at = words.index("--resume")
            given = words[at + 1 : at + 2] if at + 1 < len(words) and not words[at + 1].startswith("--") else []
            rest = words[:at] + words[at + 1 + len(given) :]
            return session.resume(given, parse(rest, description) if rest or command else None, command)
        return session.begin(parse(words, description), command)
    except (WrongQuestion, ConfigError) as error:
        return report_user_error(error, rank=0)
    except NoNetwork as error:
        report_user_error(error, rank=0)
        return session.PAUSED


def parse(words: list[str], description: str) -> Options:
    """Options of a command line; --help ends the process. Raises ConfigError for what is no option."""
    return read_options(Options, "launch/bisect_versions.py", description, words)
