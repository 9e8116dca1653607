"""The environment that an engine's processes get: without torchrun's variables, and never left behind in this
process.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# torchrun sets these for its workers. An engine that inherits them behaves like a worker: with
# TORCHELASTIC_USE_AGENT_STORE, its rank 0 connects to a store that no process serves.
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
)  # fmt: skip
TORCHRUN_PREFIX = "TORCHELASTIC_"


def engine_environment(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment without torchrun's variables and with `changes`; None removes a variable."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
    }
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


@contextmanager
def child_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Remove torchrun's variables from os.environ and apply `changes` (None removes a variable), for an engine to
    inherit.

    At the end os.environ is exactly as before, even if the engine changed it.
    """
    before = dict(os.environ)
    try:
        _set_environment(engine_environment(before, changes))
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Change only the variables that differ, so that other threads never see an empty environment."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})
