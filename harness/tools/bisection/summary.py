"""A bisect's answer for programs: `answer` in state.json, and `status --json`."""

import json
from typing import Any

from harness.runtime import redact
from harness.tools.bisection.answer import EXIT_CODES, Answer, answer_of
from harness.tools.bisection.state import State
from harness.tools.bisection.story import sentences


def told(state: State, answer: Answer) -> dict[str, Any]:
    """Its kind, the exit code that goes with it, its edges by candidates' names, and its sentences."""
    names = [candidate.name for candidate in state.candidates]
    edges = [
        {"before": names[edge.before], "after": names[edge.after], "among": [names[index] for index in edge.answer]}
        for edge in answer.edges
    ]
    said = sentences(state, answer) if answer.kind != "open" else []
    return {"kind": answer.kind, "exit_code": EXIT_CODES[answer.kind], "edges": edges, "sentences": said}


def refused(sentence: str) -> dict[str, Any]:
    """Where the ends cannot be bisected between, as both are good, or one could not be judged."""
    return {"kind": "refused", "exit_code": 2, "edges": [], "sentences": [sentence]}


def as_json(state: State, process: int | None) -> str:
    """What is known, without secrets. process: the one that runs it now."""
    answer = answer_of(state)
    found = state.answer if answer.kind == "open" and state.answer else told(state, answer)
    verdicts = [
        {"name": record.name, "verdict": record.verdict, "reason": record.reason, "seconds": record.seconds}
        | {"log": record.decisive.log if record.decisive else ""}
        for record in state.records
    ]
    whole = {"answer": found, "verdicts": verdicts, "not_run": state.closed, "process": process}
    return json.dumps(_redacted(whole), indent=1)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_redacted(each) for each in value]
    return redact.text(value) if isinstance(value, str) else value
