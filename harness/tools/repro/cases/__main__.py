"""Run one variant of a case: python -m harness.tools.repro.cases SLUG broken|healthy."""

import importlib
import sys
from typing import get_args

from harness.runtime.errors import CANNOT_RUN_HERE, MISTAKE, UnsupportedEnvironment
from harness.tools.repro.case import ABSENT, CANNOT, NotPresent, UnknownCase, Variant, load, module_name

if __name__ == "__main__":
    slug, variant = [*sys.argv[1:3], "", ""][:2]
    try:
        load(slug)
        if variant not in get_args(Variant):
            raise UnknownCase(f"the variant must be broken or healthy, got {variant!r}")
        importlib.import_module(module_name(slug)).program(variant == "broken")
    except UnknownCase as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except UnsupportedEnvironment as error:
        print(f"{CANNOT}{error}", flush=True)
        sys.exit(CANNOT_RUN_HERE)
    except NotPresent as error:
        print(f"{ABSENT}{error}", flush=True)
