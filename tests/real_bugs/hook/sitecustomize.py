"""Python imports this as it starts: in every process of a run that real_bugs/run.py has started. It plants the bug as
soon as the module that the bug is in has been imported.
"""

import importlib
import importlib.machinery
import os
import sys
from typing import Any

PLACE = os.environ.get("REAL_BUG_PLACE", "")
"""The module that the bug is in."""
PLANT = os.environ.get("REAL_BUG", "")
"""MODULE:NAME of the bug's declaration."""


class Planter:
    """Finds the bug's module as Python does, and plants the bug once the module's own code has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PLACE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec and spec.loader, f"no module {name}"
        run: Any = spec.loader.exec_module

        def run_and_plant(module: Any) -> None:
            run(module)
            declared, _, bug = PLANT.partition(":")
            getattr(importlib.import_module(declared), bug).plant(module)

        spec.loader.exec_module = run_and_plant  # type: ignore[method-assign]
        return spec


if PLACE:
    sys.meta_path.insert(0, Planter())
