"""What a bisect's state says to people, and to `replay`."""

import json
import time
from pathlib import Path
from shlex import join, quote

from harness.tools.bisection import measured, requirements
from harness.tools.bisection.answer import Answer, SecondCause, answer_of, is_sure
from harness.tools.bisection.candidates import names
from harness.tools.bisection.cause import cause_of, differ_only_in_place, pattern_for
from harness.tools.bisection.confidence import confidence, rate_of, repeat_needed
from harness.tools.bisection.question import Question, WrongQuestion
from harness.tools.bisection.search import Edge, masks
from harness.tools.bisection.show import left, rows
from harness.tools.bisection.state import Record, State, owner

_VERDICTS = ("good", "bad", "skip", "other")
_START = "start "


def status(state: State, folder: Path) -> str:
    """A table, and the answer or what is left."""
    lines = [f"{join(['launch/bisect_versions.py', *state.question.words()])}", ""]
    found = [cells for cells, _ in rows(state)]
    widths = [max(len(cells[column]) for cells in found) for column in range(3)]
    for cells in found:
        lines.append("  ".join([*(cells[i].ljust(widths[i]) for i in range(3)), cells[3]]).rstrip())
    answer = answer_of(state)
    if answer.kind == "open":
        refused = state.answer.get("sentences", [])
        resume = f"go on with: python launch/bisect_versions.py --resume {folder}"
        lines += ["", *(refused or [left(state), _running(folder) or resume])]
    else:
        lines += ["", *sentences(state, answer)]
    return "\n".join(lines)


def _running(folder: Path) -> str:
    """What a bisect that runs in the folder does now; "" where none does."""
    process = owner(folder)
    if process is None:
        return ""
    runs = sorted(folder.glob("runs/*/*"), key=lambda run: run.stat().st_mtime)
    newest = (
        f"; its newest run is {runs[-1].parent.name}, since {time.time() - runs[-1].stat().st_mtime:.0f} s"
        if runs
        else ""
    )
    return f"process {process} is running it{newest}{f', with its output in {runs[-1]}' if runs else ''}"


def log(state: State) -> str:
    """The question and a line for each verdict, in their order. A line may be taken out or changed before a replay."""
    lines = [
        "# A bisect's verdicts, oldest first. `launch/bisect_versions.py replay FILE` begins anew with those that are left here.",
        _START + json.dumps(state.question.as_dict()),
    ]
    lines += [f"{record.verdict} {record.name}  # {record.reason}" for record in state.records]
    return "\n".join(lines) + "\n"


def read_log(file: Path) -> tuple[Question, list[Record]]:
    """The inverse of log. Raises WrongQuestion."""
    question, records = None, []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        verdict, _, rest = line.partition(" ")
        if line.startswith(_START):
            try:
                question = Question.of(json.loads(rest))
            except (ValueError, KeyError, TypeError) as error:
                raise WrongQuestion(f"{file}:{number} is not a question as `log` writes it: {error}.") from error
        elif verdict in _VERDICTS:
            name, _, reason = rest.partition("  # ")
            records.append(Record(name=name.strip(), verdict=verdict, reason=reason or "replayed", replayed=True))  # type: ignore[arg-type]
        else:
            raise WrongQuestion(
                f"{file}:{number} begins with {verdict!r}, but must with one of {', '.join(_VERDICTS)}."
            )
    if question is None:
        raise WrongQuestion(
            f"{file} has no line that begins with {_START.strip()!r}; give the output of `launch/bisect_versions.py log`."
        )
    return question, records


def sentences(state: State, answer: Answer) -> list[str]:
    """What was found, the answer first."""
    what = "commit" if state.question.options.git else "release"
    if answer.kind == "several":
        told = _several(state, answer, what)
    else:
        told = [_one(state, answer.edges[0], what)]
        told += [*_masked(state, answer.edges[0]), *_bad_end_otherwise(state, answer.edges[0])]
    told += _mixed(state, answer)
    told += measured.sentences(state, answer.edges[0] if len(answer.edges) == 1 else None)
    told += _sureness(state)
    unseen = sum(
        1 for i, each in enumerate(state.candidates) if i not in state.verdicts and each.name not in state.closed
    )
    if unseen and answer.kind != "several":
        told.append(
            f"{unseen} other candidates were not run; a failure that came and went among them would not show (--second-look N)."
        )
    return told


def _one(state: State, edge: Edge, what: str) -> str:
    """The first bad one, or first good one, or those among which it is."""
    before, after = (state.candidates[i].shown for i in (edge.before, edge.after))
    first, last = _words(state, edge)
    if len(edge.answer) == 1:
        is_probably = "is" if is_sure(state) else "is probably"
        return f"The first {first} {what} {is_probably} {after}; the last {last} one is {before}."
    among = [state.candidates[i] for i in edge.answer]
    return (
        f"The first {first} {what} {'is' if is_sure(state) else 'is probably'} one of {len(among)}: {names(among, 12)}. The last that is known to be {last} is {before}, and what"
        " lies between could not be judged."
    )


def _mixed(state: State, answer: Answer) -> list[str]:
    """Where an edge's candidates ran over packages that they do not ask for, the answer is of that mix."""
    sides = dict.fromkeys(index for edge in answer.edges for index in (edge.before, edge.after))
    return [told for index in sides if (told := requirements.sentence(state, state.record(index)))]


def _sureness(state: State) -> list[str]:
    """How sure an answer about a failure that comes and goes is, and what would make it surer."""
    sure, rate = confidence(state), rate_of(state)
    if sure is None or rate is None:
        return []
    told = [
        f"The answer is right with a probability of {min(sure, 0.999):.1%}, if each bad one fails as often as the bad end, which after its"
        f" first failure failed in {rate.shown} runs."
    ]
    if not is_sure(state):
        more = repeat_needed(state)
        above = f"a --confirm above {state.question.options.confirm}"
        would = f"--repeat {more}, or {above}," if more else above
        told.append(f"That is less than --confidence {state.question.options.confidence}: {would} would do.")
    return told


def _words(state: State, edge: Edge) -> tuple[str, str]:
    return ("bad", "good") if state.verdicts[edge.before] == "good" else ("good", "bad")


def _masked(state: State, edge: Edge) -> list[str]:
    hidden = masks(list(edge.answer), state.verdicts)
    if not hidden:
        return []
    reasons = list(dict.fromkeys(state.record(i).reason for i in hidden))
    listed = names([state.candidates[i] for i in hidden], 12)
    return [f"Another failure masks it in {len(hidden)}: {listed}. There they fail with: {'; '.join(reasons[:3])}."]


def _several(state: State, answer: Answer, what: str) -> list[str]:
    if len(answer.edges) > 1:
        told = [
            f"There are {len(answer.edges)} places where the verdict changes, so there is more than one cause, or the failure comes and"
            " goes (--repeat):"
        ]
        told += [_one(state, edge, what) for edge in answer.edges]
    else:
        told = [
            "There are two causes, or more: the bad end fails otherwise than the candidate at the edge.",
            _one(state, answer.edges[0], what),
        ]
    return [*told, *(_second(state, answer.second) if answer.second else [])]


def _second(state: State, cause: SecondCause) -> list[str]:
    """The failure at the edge, and where the bad end's own one shows; what fails otherwise in between may hide it."""
    first, seen = cause.hidden[0], cause.seen
    shown = [state.candidates[index].shown for index in (first, seen)]
    seen_first, before = ("last", "after") if seen < first else ("first", "before")
    reasons = [state.record(index).reason.rstrip(".") for index in (first, seen)]
    hiding = names([state.candidates[index] for index in sorted(cause.hidden)], 12)
    told = [
        f"{shown[0]} fails with: {reasons[0]}.",
        f"The bad end's own failure is {seen_first} seen at {shown[1]}: {reasons[1]}. What was run {before} it fails otherwise,"
        f" which may hide it: {hiding}.",
    ]
    ends = [state.record(index).decisive for index in (seen, first)]
    assert ends[0] and ends[1]
    if differ_only_in_place(cause_of(ends[0]), cause_of(ends[1])):
        told.append(
            f"The message is the same, but it comes from {ends[0].place} in place of {ends[1].place}; a function that was"
            " renamed looks like this too."
        )
    elif alone := pattern_for(ends[0], ends[1]):
        told.append(f"--match {quote(alone)} looks for the bad end's failure alone.")
    return told


def _bad_end_otherwise(state: State, edge: Edge) -> list[str]:
    """The bad end's failure, where the one at the edge has other words and still counts as the same."""
    bad_end, at_edge = state.end("bad"), edge.before if state.question.options.find_fix else edge.after
    if state.question.kind != "failure" or bad_end in (None, at_edge):
        return []
    end, near = (state.record(index) for index in (bad_end, at_edge))
    if not end.decisive or not near.decisive or cause_of(end.decisive).shape == cause_of(near.decisive).shape:
        return []
    return [f"The bad end {end.name[:12]} fails with other words, taken for the same cause: {end.reason.rstrip('.')}."]
