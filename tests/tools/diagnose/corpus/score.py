"""How many logs of the corpus launch/diagnose.py names rightly.

python -m tests.tools.diagnose.corpus.score            every set that is here
python -m tests.tools.diagnose.corpus.score FOLDER     a set elsewhere: FOLDER, and FOLDER.toml beside it
"""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.entries import UNKNOWN

FOLDER = Path(__file__).parent
SETS = ("signatures", "measure", "fresh")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What diagnose says of one log of the corpus."""

    log: str
    cause: str
    """The true one: a slug of the catalogue, or "unknown"."""
    named: str
    """A slug, or "unknown" where no failure, or none that is known, was seen."""
    is_known: bool
    """Whether it is named for sure; otherwise the log only looks like it."""

    @property
    def is_right(self) -> bool:
        return self.named == self.cause

    @property
    def is_false(self) -> bool:
        """Whether it is named, and wrongly."""
        return self.named not in (UNKNOWN, self.cause)


def answers(logs: Path) -> list[Answer]:
    """Diagnose each log of the set. Raises OSError, and AssertionError where logs and index differ."""
    index = tomllib.loads(logs.with_suffix(".toml").read_text(encoding="utf-8"))["logs"]
    files = {file.stem: file for file in logs.glob("*.log")}
    assert set(files) == set(index), f"{logs}: index and logs differ: {sorted(set(files) ^ set(index))}"
    return [_answer(file, index[log]["cause"]) for log, file in sorted(files.items())]


def _answer(file: Path, cause: str) -> Answer:
    finding = diagnose([str(file)]).finding
    return Answer(
        log=file.stem,
        cause=cause,
        named=finding.entry.slug if finding else UNKNOWN,
        is_known=finding is not None and finding.is_known,
    )


def false_names(found: Sequence[Answer], is_known: bool) -> list[Answer]:
    return [each for each in found if each.is_false and each.is_known == is_known]


def named_share(found: Sequence[Answer]) -> float:
    """Return the share of the known logs whose cause is named."""
    known = [each for each in found if each.cause != UNKNOWN]
    return sum(each.is_right for each in known) / len(known)


def as_text(name: str, found: Sequence[Answer]) -> str:
    known = [each for each in found if each.cause != UNKNOWN]
    unknown = [each for each in found if each.cause == UNKNOWN]
    missed = [each for each in known if each.named == UNKNOWN]
    right = [each for each in known if each.is_right]
    lines = [
        f"{name}: {len(found)} logs, {len(known)} known, {len(unknown)} unknown",
        f"  known:   {len(right)} named ({named_share(found):.0%}; {sum(each.is_known for each in right)} for sure), {len(missed)} missed",
        f"  unknown: {sum(each.is_right for each in unknown)} rightly unknown",
        f"  false names: {len(false_names(found, True))} known, {len(false_names(found, False))} looks like",
    ]
    lines += [f"    {each.log}: {each.named}, but is {each.cause}" for each in found if each.is_false]
    return "\n".join([*lines, *(f"    missed: {each.log}: {each.cause}" for each in missed)])


def main(arguments: Sequence[str]) -> None:
    given = [Path(each) for each in arguments] or [FOLDER / name for name in SETS if (FOLDER / name).is_dir()]
    for each in given:
        print(as_text(each.name, answers(each)))


if __name__ == "__main__":
    main(sys.argv[1:])
