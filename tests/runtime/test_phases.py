"""One list of phases: what the code begins is in it, and the other way round."""

import ast
from pathlib import Path

from harness.runtime.phases import MEET, PHASES, RUN

HARNESS = Path(__file__).resolve().parents[2] / "harness"


def phases_in_the_code() -> set[str]:
    """First arguments of phase(...), and of timed(...) of a Verification, or of one that adds to it: verify_<part>."""
    found = set()
    for file in HARNESS.rglob("*.py"):
        tree = ast.parse(file.read_text())
        classes = [
            node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name.endswith("Verification")
        ]
        inside = {id(node) for each in classes for node in ast.walk(each)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                continue
            called = ast.unparse(node.func)
            if called == "phase" or called.endswith("events.phase"):
                found.add(str(node.args[0].value))
            elif called.endswith(("verification.timed", "checks.timed")) or (
                called == "self.timed" and id(node) in inside
            ):
                found.add(f"verify_{node.args[0].value}")
    return found


def test_every_phase_can_have_a_deadline() -> None:
    assert phases_in_the_code() | {RUN, MEET} == set(PHASES)
    assert len(set(PHASES)) == len(PHASES)
