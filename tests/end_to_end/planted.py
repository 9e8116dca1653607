"""What the programs ppo_with_*.py have in common: launch/ppo.py's command line, and one fault in the code that it runs."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn


def run_with(plant: Callable[[], None], **engine_args: Any) -> NoReturn:
    """Plant the fault and run PPO, whose command line is this program's. engine_args: more of engine.args."""
    from harness.run import run
    from harness.tools.command_line import parse
    from harness.tools.observers import standard_observers

    config = parse(sys.argv[1:]).config
    plant()
    config = replace(config, engine=replace(config.engine, args=config.engine.args | engine_args))
    sys.exit(run(config, standard_observers(config)))
