"""What a translation collects: values for the harness's keys with their origin, and what becomes of each override."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.config.layers import COMMAND_LINE, Layer, build_config, shown
from harness.config.schema import Config
from harness.tools.verl.overrides import Override, VerlConfig, is_known, nearest_key
from harness.tools.verl.without_counterpart import IRRELEVANT, NEUTRAL

Fate = Literal["mapped", "irrelevant", "unsupported", "unknown"]
FATES: tuple[Fate, ...] = ("mapped", "irrelevant", "unsupported", "unknown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one override, or of the command as a whole; `text` are harness keys, or a reason."""

    override: str
    fate: Fate
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A value of a harness key, and where it comes from."""

    value: Any
    origin: str


@dataclass(kw_only=True, slots=True)
class Draft:
    """The harness config that is being written. Keys of verl are written without actor_rollout_ref where it begins with @."""

    verl: VerlConfig
    entries: dict[str, Entry] = field(default_factory=dict)
    mapped: dict[str, list[str]] = field(default_factory=dict)
    """verl's key -> the harness keys that it decides."""
    reasons: dict[str, Verdict] = field(default_factory=dict)
    """verl's key -> why it decides nothing."""
    of_command: list[Verdict] = field(default_factory=list)
    """What is no override, or of a default that no override sets."""

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return verl's value of a key; @ stands for actor_rollout_ref."""
        return self.verl.get(full(key), otherwise)

    def given(self, key: str) -> bool:
        """Return whether an override sets the key."""
        return full(key) in self.verl.given

    def put(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        """Set a harness key from these keys of verl."""
        given = [self.verl.given[full(source)].text for source in sources if self.given(source)]
        origin = ", ".join(given) or (f"verl {self.verl.release}'s default" if sources else "")
        self.entries[key] = Entry(value=value, origin="; ".join(filter(None, (origin, note))))
        for source in sources:
            self.mapped.setdefault(full(source), []).append(key)

    def irrelevant(self, reason: str, *keys: str) -> None:
        """Say why keys of verl have nothing to decide."""
        self._explain("irrelevant", reason, keys)

    def unsupported(self, reason: str, *keys: str) -> None:
        """Say what the values of keys would change, and do not; of keys that are not given, as of the command."""
        self._explain("unsupported", reason, keys)
        if not any(self.given(key) for key in keys):
            default = f"{full(keys[0])}={shown(self.get(keys[0]))} (verl {self.verl.release}'s default)"
            self.of_command.append(Verdict(override=default, fate="unsupported", text=reason))

    def _explain(self, fate: Fate, reason: str, keys: tuple[str, ...]) -> None:
        for key in map(full, keys):
            text = self.verl.given[key].text if key in self.verl.given else key
            self.reasons.setdefault(key, Verdict(override=text, fate=fate, text=reason))

    def table(self) -> dict[str, Any]:
        """Return the entries as the nested table of a config file."""
        found: dict[str, Any] = {}
        for key, entry in self.entries.items():
            section, name, *inner = key.split(".", 2)
            target = found.setdefault(section, {})
            if inner:
                target.setdefault(name, {})[inner[0]] = entry.value
            else:
                target[name] = entry.value
        return found

    def config(self) -> Config:
        """Return the harness's config of the entries. Raise ConfigError for a value that is not of its key's type."""
        return build_config([Layer(COMMAND_LINE, self.table())])

    def verdicts(self) -> Iterator[Verdict]:
        """Yield what became of each override, in order, then of the command."""
        for key, override in self.verl.given.items():
            yield self._verdict(key, override)
        yield from self.of_command

    def _verdict(self, key: str, override: Override) -> Verdict:
        text = override.text
        if key in self.reasons:
            return self.reasons[key]
        if key in self.mapped:
            return Verdict(override=text, fate="mapped", text=", ".join(dict.fromkeys(self.mapped[key])))
        for pattern, reason in IRRELEVANT.items():
            if re.fullmatch(pattern, key):
                return Verdict(override=text, fate="irrelevant", text=reason)
        for pattern, (neutral, changes) in NEUTRAL.items():
            if re.fullmatch(pattern, key):
                value = self.verl.get(key)
                if any(value == each and type(value) is type(each) for each in neutral):
                    return Verdict(override=text, fate="irrelevant", text=f"{shown(value)}: as here ({changes})")
                if not self.verl.is_default(key):
                    return Verdict(override=text, fate="unsupported", text=changes)
        if self.verl.is_default(key):
            default = f"verl {self.verl.release}'s default, which sets nothing here"
            return Verdict(override=text, fate="irrelevant", text=default)
        if not is_known(key):
            near = nearest_key(key)
            hint = f"the nearest of verl's keys is {near}" if near else "no key of verl looks like it"
            return Verdict(override=text, fate="unknown", text=f"no release of verl from 0.2 to 0.9 has it; {hint}")
        return Verdict(
            override=text, fate="unsupported", text="nothing here corresponds to it, so that its effect is missing"
        )


def full(key: str) -> str:
    """Return a key with actor_rollout_ref where @ stands for it."""
    return key.replace("@", "actor_rollout_ref.", 1) if key.startswith("@") else key
