"""From the release to the commit: the question about a checkout that a bisect over releases leads to."""

from dataclasses import replace
from pathlib import Path

from harness.tools.bisection import commits
from harness.tools.bisection.question import Question
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import State

FOLDER = "commits"
"""Of the bisect over commits, in that over releases."""


def question_of(state: State, edge: Edge, checkout: Path, folder: Path) -> Question:
    """The commits between the tags of the edge's two releases, over the packages that the bad one ran with. A tag that lies on
    a branch gives way to where the branch began. Raises WrongQuestion."""
    options = state.question.options
    tags = [commits.of_version(checkout, options.package, state.candidates[i].name) for i in (edge.before, edge.after)]
    older, newer = commits.fork_point(checkout, *tags), tags[1]
    bad = next(record for i in (edge.before, edge.after) if (record := state.record(i)).verdict == "bad")
    moved = replace(
        options,
        git=str(checkout),
        then_git="",
        environments="",
        wheels="",
        only_package=False,
        hold=(),
        python=bad.python,
        good=newer if options.find_fix else older,
        bad=older if options.find_fix else newer,
        dir=str(folder / FOLDER),
        second_look=0,
    )
    return Question(options=moved, command=state.question.command, folder=state.question.folder)
