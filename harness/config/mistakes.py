"""Mistakes of a config. Checks find them, and refuse() tells all of them at once, the likeliest cause first."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment

COMMAND_LINE = "command line"
KEY = re.compile(rf"\b(?:{'|'.join(each.name for each in fields(Config))})\.\w+(?:\.\w+)?")


class ConfigError(ValueError):
    """A user's mistakes, one sentence each: the key, the value, what is allowed and what to do. Exit code 2.

    Of several, each is in its own line, and a last line says how many there are.
    """


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong with a config or a command line."""

    sentence: str
    key: str = ""
    """What the user should change: section.name, or section.name.inner for an entry of a table. "": an option."""
    spoils: tuple[str, ...] = ()
    """Keys whose values nobody knows because of it. What depends on them is not judged until it is mended."""
    unsupported: bool = False
    """The setting is right, but not on this machine or with this sglang: exit code 125 instead of 2."""

    @property
    def names(self) -> set[str]:
        """The keys in the sentence, and its own."""
        return {self.key, *KEY.findall(self.sentence)}


@dataclass(frozen=True, slots=True)
class KeysRead:
    """What is known of a config from its files and its command line."""

    given: Mapping[str, str] = field(default_factory=dict)
    """Key -> the file that sets it, or COMMAND_LINE."""
    mistakes: tuple[Mistake, ...] = ()
    """What was found so far. Each key that they spoil has its default in the config."""

    @property
    def spoilt_sections(self) -> set[str]:
        """Sections with a key whose value is not known."""
        return {key.partition(".")[0] for each in self.mistakes for key in each.spoils}

    def plus(self, found: Iterable[Mistake]) -> "KeysRead":
        """Return the same with more mistakes."""
        return replace(self, mistakes=(*self.mistakes, *found))


NOTHING_READ = KeysRead()


def refuse(reading: KeysRead) -> None:
    """Raise one error that tells all mistakes, causes before consequences; return if there is none.

    It is UnsupportedEnvironment if nothing but this machine, or its sglang, is in the way; otherwise ConfigError.
    """
    told = in_order(without_consequences(reading.mistakes), reading.given)
    if not told:
        return
    lines = [each.sentence for each in told]
    if len(told) > 1:
        lines.append(_summary(told, reading.given))
    raise (UnsupportedEnvironment if all(each.unsupported for each in told) else ConfigError)("\n".join(lines))


def without_consequences(found: Iterable[Mistake]) -> list[Mistake]:
    """Leave out what depends on a key whose value is not known, and what is said twice."""
    found = list(dict.fromkeys(found))
    spoilt = {key for each in found for key in each.spoils}
    return [each for each in found if each.spoils or not each.key or not each.names & spoilt]


def in_order(found: Sequence[Mistake], given: Mapping[str, str]) -> list[Mistake]:
    """Sort mistakes so that the likeliest cause comes first: keys set on the command line, then mistakes that mention such a
    key, then keys set in files.

    Within each group, a mistake that mentions another mistake's key comes after it, because it may only follow from it.
    """
    wrong = {each.key for each in found}
    on_command_line = {key for key, source in given.items() if source == COMMAND_LINE}

    def rank(each: Mistake) -> tuple[int, int]:
        places = (
            each.key in on_command_line or not each.key,
            bool(each.names & on_command_line),
            each.key in given,
            True,
        )
        return places.index(True), len((each.names & wrong) - {each.key})

    return sorted(found, key=rank)


def _summary(told: Sequence[Mistake], given: Mapping[str, str]) -> str:
    """Return the last line: how many there are, and what to do."""
    counts = Counter(key for each in told for key in sorted(each.names) if given.get(key) == COMMAND_LINE)
    for key, count in counts.most_common(1):
        if count > 1:
            where = f"is in {'all' if count == len(told) else count} of them"
            return f"{len(told)} mistakes, and {key} ({COMMAND_LINE}) {where}: change it, or mend each."
    return f"{len(told)} mistakes: mend all of them, from the first on, as a later one may follow from an earlier one."
