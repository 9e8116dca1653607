"""What every case at a true size imports, once: a fork server imports this module, and then forks the variants.

Each rank of a stage is built where a user runs a case; here only those that tell what the others do.
"""

import sys
from pathlib import Path

from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.tools.engine_class import engine_answer
from harness.tools.repro import shared_imports
from harness.tools.repro.cases import true_size
from tests.tools.full_size.imported import script


def run_program(words: bytes) -> None:
    """Run a variant in the process that was forked for it; launch/full_size.py is no process of its own there."""
    true_size.full_size = full_size
    of_every_rank = engine_answer.ask_engine
    engine_answer.ask_engine = lambda *shape_and_groups, every_name: of_every_rank(*shape_and_groups)
    shared_imports.run_program(words)


def full_size(folder: Path, *options: object) -> None:
    code = script.main([str(folder), *map(str, options)])
    if code == CANNOT_RUN_HERE:
        raise UnsupportedEnvironment("launch/full_size.py cannot answer here, see above.")
    sys.exit(code)
