"""The harness config that a translation writes: each value with its origin, and what became of each override.

Keys of verl are written "@.rollout.n" for "actor_rollout_ref.rollout.n".
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from harness.config.layers import COMMAND_LINE, KINDS, ConfigError, Layer, build_config, key_types, shown
from harness.config.schema import Config
from harness.tools.verl.overrides import (
    RELEASES,
    Override,
    VerlConfig,
    defaults,
    is_known,
    nearest_key,
)

Fate = Literal["mapped", "irrelevant", "unsupported", "unknown"]
FATES: tuple[Fate, ...] = ("mapped", "irrelevant", "unsupported", "unknown")
SWITCHES = ("enable", "enabled", "rank")
"""Keys that turn off everything in their table, if they are false or 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of an override, or of the command as a whole. `text` is a list of harness keys, or a reason."""

    override: str
    fate: Fate
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The value of a harness key, and where it comes from."""

    value: Any
    origin: str


@dataclass(kw_only=True, slots=True)
class Draft:
    """The harness config that is being written."""

    verl: VerlConfig
    entries: dict[str, Entry] = field(default_factory=dict)
    mapped: dict[str, list[str]] = field(default_factory=dict)
    """verl's key -> the harness keys that it decides."""
    reasons: list[tuple[str, Fate, str]] = field(default_factory=list)
    """(key of verl, with * for any text; fate; reason) for keys that other settings overrule. The first match
    counts."""
    of_command: list[Verdict] = field(default_factory=list)
    """Verdicts that belong to no override: on hydra's options, and on defaults of verl."""

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return verl's value of a key; `otherwise` if the release has no such key."""
        return self.verl.get(full(key), otherwise)

    def given(self, key: str) -> bool:
        """Return whether an override sets the key."""
        return full(key) in self.verl.given

    def since(self, release: str) -> bool:
        """Return whether the command is for this release of verl or a newer one."""
        return RELEASES.index(self.verl.release) >= RELEASES.index(release)

    def integer(self, key: str, otherwise: int | None = None, least: int | None = None) -> int:
        """Return verl's value of a key. Raise ConfigError if it is no integer, or is below `least`."""
        value = int(of_type(int, self.get(key, otherwise), key))
        if least is not None and value < least:
            raise ConfigError(f"{full(key)} must be at least {least}, got {value}.")
        return value

    def integer_or(self, otherwise: int, key: str, least: int | None = None) -> int:
        """Return verl's value of a key as integer() does; `otherwise` if it is null, or the release has no such key."""
        return otherwise if self.get(key) is None else self.integer(key, least=least)

    def number(self, key: str, otherwise: float | None = None) -> float:
        """Return verl's value of a key. Raise ConfigError unless it is a number."""
        return float(of_type(float, self.get(key, otherwise), key))

    def number_or(self, otherwise: float, key: str) -> float:
        """Return verl's value of a key as number() does; `otherwise` if it is null or false, or the release has no such
        key.
        """
        return otherwise if self.get(key) in (None, False) else self.number(key)

    def put(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        """Set a key of the harness. sources: the keys of verl that its value comes from.

        Raise ConfigError for a wrong type.

        A reference to a key that verl does not have is refused, as hydra refuses it.
        """
        if isinstance(value, str) and "${" in value:
            raise ConfigError(
                f"{full(sources[0])}={value} refers to a key that verl's config does not have; write its value."
            )
        kind = key_types().get(key)
        if kind in KINDS:
            value = of_type(kind, value, sources[0] if sources else key)
        given = [self.verl.given[full(source)].text for source in sources if self.given(source)]
        origin = ", ".join(given) or (f"verl {self.verl.release}'s default" if sources else "")
        self.entries[key] = Entry(value=value, origin="; ".join(filter(None, (origin, note))))
        for source in sources:
            self.mapped.setdefault(full(source), []).append(key)

    def sources(self, key: str) -> list[str]:
        """Return the keys of verl that decide a key of the harness."""
        return [source for source, keys in self.mapped.items() if key in keys]

    def ignore(self, reason: str, *keys: str) -> None:
        """Say why keys of verl decide nothing in this command. A * in a key matches any text."""
        self.reasons += [(full(key), "irrelevant", reason) for key in keys]

    def lose(self, reason: str, *keys: str) -> None:
        """Say what the values of keys would change, and do not. If no override sets them, it is said of the command."""
        self.reasons += [(full(key), "unsupported", reason) for key in keys]
        if not any(self.given(key) for key in keys):
            default = f"{full(keys[0])}={shown(self.get(keys[0]))} (verl's default)"
            self.of_command.append(Verdict(override=default, fate="unsupported", text=reason))

    def config(self) -> Config:
        """Return the harness's config. Raise ConfigError for a value that its key does not take."""
        table: dict[str, Any] = {}
        for key, entry in self.entries.items():
            *path, name = key.split(".", 2)
            target = table
            for part in path:
                target = target.setdefault(part, {})
            target[name] = entry.value
        return build_config([Layer(COMMAND_LINE, table)])

    def verdicts(self) -> Iterator[Verdict]:
        """Yield what became of each override, in order, then what is said of the command.

        Printed keys that keys.toml leaves out, such as a profiler's, may have verl's defaults; they are not named if
        they are irrelevant.
        """
        for key, override in self.verl.given.items():
            fate, text = self._fate(key, override)
            if self.verl.printed and fate == "irrelevant" and key not in defaults(self.verl.release, self.verl.trainer):
                continue
            yield Verdict(override=override.text, fate=fate, text=text)
        yield from self.of_command

    def _fate(self, key: str, override: Override) -> tuple[Fate, str]:
        """Return what became of a key: the most specific answer first."""
        for pattern, fate, reason in self.reasons:
            if fnmatchcase(key, pattern):
                return fate, reason
        if key in self.mapped:
            return "mapped", ", ".join(dict.fromkeys(self.mapped[key]))
        row = row_of(key)
        if row and "harmless" in row:
            return "irrelevant", row["harmless"]
        value = self.verl.get(key)
        if self._changes_nothing(key, value, row):
            return "irrelevant", f"{shown(value)} changes nothing" + (f" (missing: {row['missing']})" if row else "")
        if row:
            return "unsupported", row["missing"]
        if is_known(key):
            return "unsupported", "there is no counterpart"
        nowhere = f"no release of verl from {RELEASES[0]} to {RELEASES[-1]} has this key"
        if self.verl.printed:
            return "unknown", f"{nowhere}, so what it does is not known"
        near = nearest_key(key)
        hint = f"the nearest key is {near}" if near else "no key of verl looks like it"
        return "unknown", f"{nowhere}; {hint}"

    def _changes_nothing(self, key: str, value: Any, row: dict[str, Any] | None) -> bool:
        """Return whether a value is the release's default, or turns off what is missing here."""
        is_default = self.verl.is_default(key)
        is_off = value in (None, False, "", {}, []) and not self.verl.default(key)
        if row is None:  # what a newer verl prints as off is taken to be so
            return is_default or (is_off and self.verl.printed is not None)
        if is_default:
            return not row.get("default_counts")
        if row.get("switched") and self._is_switched_off(key):
            return True
        return (is_off and not row.get("false_counts")) or value in row.get("harmless_values", ())

    def _is_switched_off(self, key: str) -> bool:
        """Return whether one of SWITCHES turns off a table that the key is in."""
        parts = key.split(".")
        tables = (".".join(parts[:number]) for number in range(1, len(parts)))
        return any(self.verl.get(f"{table}.{name}") in (False, 0) for table in tables for name in SWITCHES)


@cache
def counterparts() -> dict[str, Any]:
    """Return counterparts.toml."""
    return tomllib.loads(Path(__file__).with_name("counterparts.toml").read_text(encoding="utf-8"))


def row_of(key: str) -> dict[str, Any] | None:
    """Return the first row of counterparts.toml that matches a key."""
    rows = counterparts()["row"]
    return next((row for row in rows if any(fnmatchcase(key, full(pattern)) for pattern in row["keys"])), None)


def of_type(kind: type, value: Any, key: str) -> Any:
    """Convert a value of verl's config to this type. Raise ConfigError if that is not possible.

    null becomes false, an integer may be a float, and anything can become text.
    """
    if kind is str:
        return str(value)
    if kind is bool and value is None:
        return False
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is bool:  # as Python compares it in verl's code: test_freq = False is 0
        return int(value)
    if type(value) is not kind:
        raise ConfigError(f"{full(key)} must be {KINDS[kind]}, got {shown(value)}.")
    return value


def full(key: str) -> str:
    """Return a key with actor_rollout_ref in place of @."""
    return key.replace("@.", "actor_rollout_ref.", 1) if key.startswith("@.") else key
