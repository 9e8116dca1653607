"""Run one variant of a case: python -m harness.tools.repro.cases SLUG broken|healthy."""

import argparse
import sys

from harness.runtime.errors import CANNOT, CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.tools.repro.case import all_cases

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    parser.add_argument("slug", choices=all_cases())
    parser.add_argument("variant", choices=("broken", "healthy"))
    chosen, _ = parser.parse_known_args()  # what follows is for the processes that a program starts
    try:
        all_cases()[chosen.slug].program(chosen.variant == "broken")
    except UnsupportedEnvironment as error:
        print(f"{CANNOT}{error}", flush=True)
        sys.exit(CANNOT_RUN_HERE)
