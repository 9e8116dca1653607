"""What launch/full_size.py imports, once: a fork server imports this module, and then forks whatever asks SGLang.

The class of a model is imported in the fork, once `prepare_import` has said which one.
"""

# ruff: noqa: E402 - the environment comes before SGLang

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from harness.runtime import cpu_standins

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as prepare_import does
cpu_standins.activate()
sys.path.append(str(Path(__file__).resolve().parents[3] / "launch"))

import full_size as script
import sglang.srt.layers.moe
import sglang.srt.model_loader.loader  # noqa: F401

import harness.tools.full_size.model_verdict  # noqa: F401
import tests.tools.full_size.asked  # noqa: F401

SECONDS = 900


def run_script(words: bytes, _: Sequence[int]) -> None:
    """Do what launch/full_size.py does with these words."""
    signal.alarm(SECONDS)
    sys.exit(script.main(json.loads(words)))


def answer(words: bytes, _: Sequence[int]) -> None:
    """Print as JSON what a function returns; the first word is its MODULE:FUNCTION, the others are its arguments."""
    signal.alarm(SECONDS)
    function, *arguments = json.loads(words)
    print(json.dumps(resolve_name(function)(*arguments)))
