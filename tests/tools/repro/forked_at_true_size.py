"""What every case at a true size imports, once: a fork server imports this module, and then forks the variants."""

# ruff: noqa: E402 - the environment comes before SGLang

import os
import sys
from pathlib import Path

from harness.runtime import cpu_standins

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as prepare_import does, which each variant still calls for its own model
cpu_standins.activate()
sys.path.append(str(Path(__file__).resolve().parents[3] / "launch"))

import full_size as script
import sglang.srt.layers.moe
import sglang.srt.model_loader.loader  # noqa: F401

from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.tools.repro import shared_imports
from harness.tools.repro.cases import true_size


def run_program(words: bytes) -> None:
    """Run a variant in the process that was forked for it; launch/full_size.py is no process of its own there."""
    true_size.full_size = full_size
    shared_imports.run_program(words)


def full_size(folder: Path, *options: object) -> None:
    code = script.main([str(folder), *map(str, options)])
    if code == CANNOT_RUN_HERE:
        raise UnsupportedEnvironment("launch/full_size.py cannot answer here, see above.")
    sys.exit(code)
