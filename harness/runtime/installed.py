"""What the scripts of launch/ are called: files in a checkout, commands of sglang-rl-harness where there is none.

A wheel holds launch/ and configs/ inside of this package (setup.cfg). Standard library only.
"""

import re
from pathlib import Path

PROGRAM = "sglang-rl-harness"
INSTALLED = (Path(__file__).parents[1] / "launch").is_dir()
"""Whether this package came in a wheel, and not with a checkout."""
COMMANDS = {
    "verify": "verify", "full-size": "full_size", "diagnose": "diagnose", "mismatch": "mismatch", "repro": "repro",
    "bisect": "bisect_versions", "report": "report", "export": "export", "doctor": "doctor", "hosts": "hosts",
    "prepare-data": "prepare_data", "from-verl": "from_verl", "ppo": "ppo", "sync": "sync", "step-bench": "step_bench",
}  # fmt: skip
"""Commands -> scripts of launch/. Not those that make and use the environment of a checkout (quickstart, run_tests,
torchrun), and not minimal, which is there to be read."""
_NAMES = {script: name for name, script in COMMANDS.items()}


def as_typed(text: str) -> str:
    """Return a text for the user, with each script of launch/ called as it is called here.

    After -- it stays a file: bisect and hosts take a script there, and find those of launch/.
    """
    if not INSTALLED:
        return text
    scripts = rf"(?<!-- )(?:python3? )?(?:[\w.~/-]*/)?launch/({'|'.join(_NAMES)})\.py"
    text = re.sub(scripts, lambda found: f"{PROGRAM} {_NAMES[found[1]]}", text)
    return re.sub(rf"(torchrun|torch\.distributed\.run) (?=-[^\n]*{PROGRAM} )", r"\1 --no-python ", text)


def as_files(command: str) -> str:
    """Return a command line with the scripts themselves in the place of sglang-rl-harness and its commands."""
    commands = rf"{PROGRAM} ({'|'.join(COMMANDS)})\b"
    return re.sub(commands, lambda found: f"launch/{COMMANDS[found[1]]}.py", command)
