"""Hydra's overrides: how they are written, verl's keys and defaults by release, and the value of a key in the end."""

import ast
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from harness.config.layers import ConfigError, shown

Release = Literal["auto", "0.2", "0.3", "0.4", "0.4.1", "0.5", "0.6", "0.7", "0.8", "0.9"]
RELEASES: tuple[str, ...] = get_args(Release)[1:]
"""The releases of verl in keys.toml, oldest first."""
Trainer = Literal["fsdp", "megatron"]
ABSENT = object()
"""Stands for the value of a key in a release that does not have the key."""
LONGEST = 10_000
"""The most characters of a text whose references are replaced."""
_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[\w.@/\-]+)(?P<equals>=)?(?P<value>.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?(?P<key>[\w.]+)(?:\s*+,\s*+(?P<default>[^{}]*))?\}")
_REFERENCED = r"\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_BARE = re.compile(rf"(?:{_REFERENCED}|\\.|[^,\[\]{{}}\\])*", re.DOTALL)
_PART = re.compile(
    r"""(?P<quoted>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?P<mark>[\[\]{},]|:(?!//)|\s+)|"""
    rf"""(?:{_REFERENCED}|\\.|:(?=//)|[^\[\]{{}},:'"\\])+""",
    re.DOTALL,
)
"""A part of a list or table: a quoted text, a mark, or a bare text."""
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d(_?\d)*(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|nan)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One override. `mark` is "", "+", "++" or "~"; `value` is None for null and for a deleted key."""

    text: str
    mark: str
    key: str
    value: Any


def parse_override(word: str) -> Override:
    """Read one word of a hydra command line. Raise ConfigError if it is not an override, or gives several values."""
    match = _OVERRIDE.fullmatch(word)
    if not match or (not match["equals"] and match["mark"] != "~"):
        raise ConfigError(f'"{word}" is not a hydra override; write KEY=VALUE, +KEY=VALUE or ~KEY.')
    value = None if match["mark"] == "~" else parse_value(match["value"], word)
    return Override(text=word, mark=match["mark"] or "", key=match["key"], value=value)


def parse_value(text: str, word: str = "") -> Any:
    """Return the value that hydra reads: null, a boolean, a number, a quoted or bare text, a list or a table.

    A reference ${key} stays text. Raise ConfigError for a sweep (a,b), for a bracket or quote that is not closed, and
    for a colon in a list that is not a URL's.
    """
    text = text.strip()
    if _BARE.fullmatch(text) and not text.startswith(("'", '"')):
        return _bare(_ESCAPED.sub(r"\1", text))
    refused = ConfigError(
        f'"{(word or text)[:200]}" is no value that hydra reads, or several (a sweep): close quotes and brackets, quote a'
        " text that has them, and give one value, a list as [a,b]."
    )
    if not text.startswith(("[", "{", "'", '"')):
        raise refused
    try:
        return ast.literal_eval(_PART.sub(_as_python, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise refused from None


def _as_python(part: re.Match[str]) -> str:
    """Return a part of a list or table as Python writes it."""
    if part["mark"]:
        return part["mark"]
    return repr(
        _ESCAPED.sub(r"\1", part["quoted"][1:-1]) if part["quoted"] else _bare(_ESCAPED.sub(r"\1", part[0].strip()))
    )


def _bare(text: str) -> Any:
    low = text.lower()
    if low in ("null", ""):
        return None if low else ""
    if low in ("true", "false"):
        return low == "true"
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eEnN]", text) else int(text)
    return text


@cache
def _histories() -> dict[Trainer, dict[str, str]]:
    tables = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
    return {"fsdp": tables["fsdp"], "megatron": tables["fsdp"] | tables["megatron"]}


@cache
def defaults(release: str, trainer: Trainer) -> Mapping[str, Any]:
    """Return every key that a release of verl has, with its default; references are texts, ${key}."""
    found = {}
    for key, history in _histories()[trainer].items():
        value: Any = ABSENT
        for part in history.split("; ") if history != "-" else ():
            since, text = part.split(" ", 1)
            if RELEASES.index(since) <= RELEASES.index(release):
                value = ABSENT if text == "-" else json.loads(text)
        if value is not ABSENT:
            found[key] = value
    return found


def is_known(key: str) -> bool:
    """Return whether any release has this key, or a table of this name."""
    return any(key in keys or any(each.startswith(f"{key}.") for each in keys) for keys in _histories().values())


def nearest_key(key: str) -> str:
    """Return the known key that ends in the same name, or else looks most like this one; "" if none does."""
    keys = {each: None for table in _histories().values() for each in table}
    name = key.rsplit(".", 1)[-1]
    same = [each for each in keys if each.rsplit(".", 1)[-1] == name]
    close = difflib.get_close_matches(key, same or keys, n=1, cutoff=0.0 if same else 0.6)
    return close[0] if close else ""


def newest_release(overrides: Iterable[Override], trainer: Trainer) -> tuple[str, list[str]]:
    """Return the newest release whose config takes the most of these overrides, and why it refuses the others.

    Hydra takes KEY=VALUE only if the config has the key, and +KEY=VALUE only if it does not, or has null.
    """
    misfits = {release: _misfits(overrides, release, trainer) for release in reversed(RELEASES)}
    release = min(misfits, key=lambda release: len(misfits[release]))
    return release, misfits[release]


def release_with_keys(keys: Iterable[str], trainer: Trainer) -> str:
    """Return the release whose config has most nearly these keys."""
    return min(reversed(RELEASES), key=lambda release: len({*keys} ^ {*defaults(release, trainer)}))


def _misfits(overrides: Iterable[Override], release: str, trainer: Trainer) -> list[str]:
    config, given = defaults(release, trainer), {each.key for each in overrides}
    found = [
        f"verl {release} has no default for {key}, and refuses to start without a value"
        for key, value in config.items()
        if value == "???" and key not in given
    ]
    for each in overrides:
        if not is_known(each.key) or each.mark == "++":  # says nothing about the release
            continue
        is_there = each.key in config or any(key.startswith(f"{each.key}.") for key in config)
        if (each.key, each.value) == ("actor_rollout_ref.rollout.mode", "sync") and config.get(each.key) == "async":
            found.append(f"{each.text}: verl {release} has removed this mode")
        adds_to_table = isinstance(each.value, dict | list)
        if each.mark in ("", "~") and not is_there:
            found.append(f"{each.text}: verl {release} has no {each.key}")
        if each.mark == "+" and not adds_to_table and config.get(each.key) is not None:
            found.append(f"{each.text}: verl {release} has this key already, and hydra refuses the plus")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlConfig:
    """verl's config: what was set, over the rest."""

    release: str
    trainer: Trainer
    given: Mapping[str, Override]
    """The last override of each key; a table counts by its entries."""
    printed: Mapping[str, Any] | None = None
    """Every key of a config that verl printed; None for a command, whose other keys have the release's defaults."""

    @property
    def others(self) -> Mapping[str, Any]:
        """The values of the keys that are not given."""
        return defaults(self.release, self.trainer) if self.printed is None else self.printed

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of a key, references resolved; `otherwise` if the config does not have the key."""
        value = self.given[key].value if key in self.given else self.others.get(key, otherwise)
        return self.resolve(value, key)

    def resolve(self, value: Any, key: str, depth: int = 0) -> Any:
        """Replace the references ${key} and ${oc.select:key,default} by their values; other resolvers stay text.

        Raise ConfigError if the text gets too long: references to references multiply, and two that name each other
        have no end.
        """
        if not isinstance(value, str) or "${" not in value or depth > 8:
            return value
        if len(value) > LONGEST:
            what = f"{key} has references to references, which together give more than {LONGEST} characters"
            raise ConfigError(f"{what}; write its value without them.")

        def target(match: re.Match[str]) -> Any:
            name = match["key"]
            if name.startswith("."):
                name = key.rpartition(".")[0] + name
            if name in self.given:
                return self.given[name].value
            known = self.others
            if name not in known and not match[0].startswith("${oc."):
                return match[0]  # hydra would refuse it
            return known[name] if name in known else _bare((match["default"] or "").strip().strip("\"'"))

        whole = _REFERENCE.fullmatch(value)
        new = target(whole) if whole else _REFERENCE.sub(lambda match: str(target(match)), value)
        return value if new == value else self.resolve(new, key, depth + 1)

    def default(self, key: str) -> Any:
        """Return the default of a key in this release, references resolved; None if it has none."""
        return self.resolve(defaults(self.release, self.trainer).get(key), key)

    def is_default(self, key: str) -> bool:
        """Return whether a key has the default of this release."""
        return key in defaults(self.release, self.trainer) and self.get(key) == self.default(key)

    def after(self, prefix: str) -> dict[str, Any]:
        """Return the given keys that begin with a prefix: the rest of the key, and the value."""
        return {key.removeprefix(prefix): self.get(key) for key in self.given if key.startswith(prefix)}


def differences_from_defaults(printed: Mapping[str, Any], release: str, trainer: Trainer) -> dict[str, Override]:
    """Return the keys of a printed config whose value is not the release's default."""
    config = VerlConfig(release=release, trainer=trainer, given={}, printed=printed)
    return {
        key: Override(text=f"{key}={shown(value)}", mark="", key=key, value=value)
        for key, value in printed.items()
        if not config.is_default(key)
    }


def flatten(overrides: Sequence[Override]) -> dict[str, Override]:
    """Return the last override of each key. A table counts as one override for each of its entries."""
    found: dict[str, Override] = {}
    for each in overrides:
        if isinstance(each.value, dict) and each.value:
            parts = [
                Override(text=each.text, mark=each.mark, key=f"{each.key}.{name}", value=value)
                for name, value in each.value.items()
            ]
            found |= flatten(parts)
        else:
            found[each.key] = each
    return found
