"""Which release of SGLang, or of anything else, broke it: found unattended, with what changed, in a report to paste.

    python launch/bisect.py --good 0.5.9 --bad 0.5.23 -- launch/ppo.py configs/cpu/quickstart.toml
    python launch/bisect.py --good 0.5.13 --bad 0.5.23 --only-package --match update-outside-session -- update.py
    python launch/bisect.py --package transformers --hold sglang==0.5.20 --good 5.6.0 --bad 5.12.1 -- script.py
    python launch/bisect.py --good 0.5.12 --bad 0.5.17 --environments FOLDER --metric logprob_diff --above 0.01 -- script.py
    python launch/bisect.py --git ~/sglang --good v0.5.20 --bad main --timeout 10m -- script.py
    python launch/bisect.py --resume [FOLDER]           go on, where a bisect was cut off
    python launch/bisect.py status [FOLDER]             what is known so far
    python launch/bisect.py log [FOLDER]                its verdicts, as `replay` reads them
    python launch/bisect.py replay FILE                 a new bisect that takes the verdicts of a log as they stand
    python launch/bisect.py judge [--match ...] -- ...  one run here and now: the script of `git bisect run`

The command's exit code decides, as in git bisect: 0 good, 1 to 124, 126, 127 and a signal bad, 125 skip, 128 and more stop.
A script gets the candidate's Python; launch/ppo.py and launch/sync.py also torchrun with the ranks that their config wants.
Exit codes: 0 found; 1 it hides among candidates that could not be judged; 2 a mistake in what was asked; 3 several causes;
4 paused (network, disk, a script that asked to stop), 130 interrupted: --resume goes on. judge: 0 good, 1 bad, 125 else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not
sys.path.sort(key=lambda each: Path(each).resolve() == Path(__file__).resolve().parent)  # its bisect.py is not Python's

from harness.bisect import session
from harness.bisect.question import Options, WrongQuestion
from harness.bisect.registry import NoNetwork
from harness.mistake import say_mistake

VERBS = {"status": session.status, "log": session.log, "replay": session.replay}


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:split], arguments[split + 1 :]
    try:
        if words and words[0] in VERBS:
            return VERBS[words[0]](words[1:])
        if words and words[0] == "judge":
            return session.judge_here(parse(words[1:]), command)
        if "--resume" in words:
            at = words.index("--resume")
            given = words[at + 1 : at + 2] if at + 1 < len(words) and not words[at + 1].startswith("--") else []
            rest = words[:at] + words[at + 1 + len(given) :]
            return session.resume(given, parse(rest) if rest or command else None, command)
        return session.begin(parse(words), command)
    except (WrongQuestion, NoNetwork) as error:
        return say_mistake(error, rank=0)


def parse(words: list[str]) -> Options:
    """Options of a command line; tyro ends the process for --help and for what it does not know."""
    import tyro

    return tyro.cli(
        Options, prog="launch/bisect.py", description=__doc__, args=words, config=(tyro.conf.FlagCreatePairsOff,)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
