"""The quickstart: three PPO steps of a tiny model on two ranks, on GPUs if there are any, from a bare Python 3.11 or newer.

    python3 launch/quickstart.py [--section.key VALUE ...]

Checks the overrides, makes the environment if there is none (harness/tools/environments.py), and becomes
`launch/torchrun.py --nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml [overrides]`, or with GPUs
configs/gpu/tiny.toml, the same task in bfloat16. If the overrides ask for another mesh, torchrun starts as many ranks as
that mesh has. Exit codes: those of launch/torchrun.py; 2 an override is wrong; 125 the environment cannot be made here.
"""

import os
import shlex
import subprocess
import sys

import _checkout

_checkout.use()

from harness.runtime import redact
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.runtime.events import working
from harness.tools import preflight
from harness.tools.command_line import exit_with, read_command, refuse_numbers_of_ranks
from harness.tools.environments import Unusable, ensure, made
from harness.tools.interrupts import become

TORCHRUN = "launch/torchrun.py"
SCRIPT = "launch/ppo.py"
CONFIGS = {"cpu": "configs/cpu/quickstart.toml", "cuda": "configs/gpu/tiny.toml"}


def main(overrides: list[str]) -> int:
    """Return only if something is wrong: torchrun takes this process's place."""
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    try:
        device = preflight.device_of(read_command(overrides).config)
        # Relative to the user's folder, in which overrides may name files, and as the README writes them.
        script, config = (os.path.relpath(_checkout.CHECKOUT / name) for name in (SCRIPT, CONFIGS[device]))
        arguments = [config, *overrides]
        command = read_command(arguments)
        if command.options.check or command.options.dry_run:  # these need no ranks
            become([sys.executable, script, *arguments])
        refuse_numbers_of_ranks(
            overrides, "leave it out: as many start as the mesh has, such as 4 with --parallel.tp 4"
        )
        if made() is None:  # what this Python can tell is told before anything is installed
            preflight.check_plan(command.config, device=device, reading=command.reading)
        with working("making the environment"):
            python = str(ensure())
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    except Unusable as problem:
        print(f"error: {problem}.", file=sys.stderr)
        return problem.exit_code
    # The environment has the packages to check the rest: models, data, engine arguments. torchrun would exit with 1
    # whatever its ranks exit with.
    # -P: whatever the user's folder holds is not imported.
    path = os.pathsep.join([str(_checkout.CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with working("checking the config"):
        checked = subprocess.run(
            [python, "-P", "-m", "harness.tools.preflight", *arguments],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends it
        )
    if checked.returncode:
        return checked.returncode
    ranks = int(checked.stdout)
    # Without an address torchrun looks for this host by its name. If that does not resolve, it tries for minutes.
    torchrun = [python, os.path.relpath(_checkout.CHECKOUT / TORCHRUN), "--nnodes=1", "--local-addr=127.0.0.1"]
    words = [*torchrun, f"--nproc-per-node={ranks}", script, *arguments]
    print(f"+ {shlex.join(redact.words(words))}", flush=True)
    become(words)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
