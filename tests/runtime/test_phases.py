"""One list of phases: what the code begins is in it, and the other way round."""

import ast
from pathlib import Path

from harness.runtime.events import MEET, PHASES, RUN

HARNESS = Path(__file__).resolve().parents[2] / "harness"


def names(argument: ast.expr) -> set[str]:
    """What a phase is called: a constant, or f"..._{role}" for each model that learns."""
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    if isinstance(argument, ast.JoinedStr) and "{role}" in ast.unparse(argument):
        return {ast.literal_eval(ast.unparse(argument)[1:]).format(role=role) for role in ("actor", "critic")}
    return set()


def phases_in_the_code() -> set[str]:
    """First arguments of phase(...)."""
    found = set()
    for file in HARNESS.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = ast.unparse(node.func)
            if called == "phase" or called.endswith("events.phase"):
                found |= names(node.args[0])
    return found


def test_every_phase_can_have_a_deadline() -> None:
    assert phases_in_the_code() | {RUN, MEET} == set(PHASES)
    assert len(set(PHASES)) == len(PHASES)
