"""Read a config: TOML files, each over those before it, then --section.key overrides, checked against the schema."""

import dataclasses
import difflib
import hashlib
import json
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from harness.config.mistakes import COMMAND_LINE, ConfigError, KeysRead, Mistake, refuse
from harness.config.schema import Config
from harness.runtime import redact

KINDS: dict[type, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
SEVERAL: dict[type, str] = {int: "integers", float: "numbers", str: "strings"}


class Layer(NamedTuple):
    """One source of values: its name, for error messages, and a nested table."""

    source: str
    table: Mapping[str, Any]


def read_layer(path: str) -> Layer:
    """Read one TOML file. Raise ConfigError if it is missing or not TOML."""
    file = Path(path)
    if not file.is_file():
        searched = "" if file.is_absolute() else f" It was looked for in the current folder, {Path.cwd()}."
        what = "give the path of a TOML file, such as configs/cpu/quickstart.toml"
        raise ConfigError(f"{path} is not a file; {what}.{searched}")
    try:
        return Layer(path, tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def override_layer(overrides: Iterable[tuple[str, str]]) -> Layer:
    """Turn ("actor.learning_rate", "1e-5") pairs into a layer; the field's type decides how the text is read."""
    kinds = key_types()
    table: dict[str, Any] = {}
    for key, text in overrides:
        *parents, name = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--{key} ({COMMAND_LINE}) is inside a value that another option sets; give one.")
        before, value = inner.get(name), _parse_text(text, kinds.get(key))
        inner[name] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
    return Layer(COMMAND_LINE, table)


def build_config(layers: Iterable[Layer]) -> Config:
    """Apply the layers, the later over the earlier. Raise ConfigError for unknown keys and wrong types."""
    config, reading = apply_layers(layers)
    refuse(reading)
    return config


def apply_layers(layers: Iterable[Layer]) -> tuple[Config, KeysRead]:
    """Apply the layers as build_config does; return the config, who set which key, unknown keys and wrong types."""
    config, given, found = Config(), dict[str, str](), list[Mistake]()
    for layer in layers:
        given |= dict.fromkeys(_keys(layer.table), layer.source)
        found += _apply(config, layer.table, layer.source, prefix="")
    return config, KeysRead(given, tuple(found))


def _keys(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield each section, its keys section.name, and section.name.inner for the entries of a table."""
    for section, values in table.items():
        yield section
        for name, value in values.items() if isinstance(values, Mapping) else ():
            yield f"{section}.{name}"
            yield from (f"{section}.{name}.{inner}" for inner in (value if isinstance(value, Mapping) else ()))


def to_toml(config: Config, without: Config | None = None) -> str:
    """Write the config as TOML that read_layer reads back to an equal Config.

    without: leave out the keys that have the same values there, such as the defaults, which are Config().
    """
    left_out = dataclasses.asdict(without) if without else {}
    lines: list[str] = []
    for section, values in dataclasses.asdict(config).items():
        there = left_out.get(section, {})
        written = [f"{name} = {toml_value(value)}" for name, value in values.items() if there.get(name, ...) != value]
        if written or not without:
            lines += [f"[{section}]", *written, ""]
    return "\n".join(lines)


def redacted(config: Config) -> Config:
    """Return the config that others may see: a mark stands in the place of each secret."""
    return build_config([Layer("a run's config", redact.values(dataclasses.asdict(config)))])


def to_redacted_toml(config: Config) -> str:
    """Write the config that others may see as TOML."""
    return to_toml(redacted(config))


def left_out(config: Config) -> Iterator[Mistake]:
    """Yield each value that was left out when the config was written, as in the config.toml of a run."""
    for section, table in dataclasses.asdict(config).items():
        for name, value in table.items():
            if mark := redact.MARK.search(toml_value(value)):
                key = f"{section}.{name}"
                yield Mistake(
                    f"{key} has {mark[0]} where a secret was left out when the file was written; give it with --{key}.",
                    key,
                    spoils=(key,),
                )


def digest(config: Config) -> str:
    """Return the sha256 of a config. Ranks compare it: with different configs they would run different things."""
    return hashlib.sha256(to_toml(config).encode()).hexdigest()


def key_types() -> dict[str, Any]:
    """Return the type of every dotted key that a config file or an override may set."""
    sections = {each.name: getattr(Config(), each.name) for each in dataclasses.fields(Config)}
    return {f"{name}.{item.name}": item.type for name, each in sections.items() for item in dataclasses.fields(each)}


def nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint at the name that looks most like this one, ignoring leading dashes, or `otherwise`."""
    plain = {each.lstrip("-"): each for each in names}
    match = difflib.get_close_matches(name.lstrip("-"), plain, n=1)
    return f"the nearest is {plain[match[0]]}" if match else otherwise


def shown(value: Any) -> str:
    """Write a value as TOML and JSON write it."""
    return json.dumps(value, default=str)


def _apply(target: Any, table: Mapping[str, Any], source: str, prefix: str) -> Iterator[Mistake]:
    """Set the fields of a section, or of the whole config. Yield what cannot be set, which keeps its value."""
    kinds = {item.name: item.type for item in dataclasses.fields(target)}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if name not in kinds:
            yield _unknown_key(key, source, [prefix + known for known in kinds])
            continue
        current = getattr(target, name)
        is_section, is_table = dataclasses.is_dataclass(current), isinstance(current, dict)
        if (is_section or is_table) and not isinstance(value, Mapping):
            yield Mistake(_must_be("a table", key, value, source), key, spoils=(key,))
        elif is_section:
            yield from _apply(current, value, source, prefix=f"{key}.")
        elif is_table:
            setattr(target, name, current | dict(value))
        elif wanted := _wrong_type(value, kinds[name]):
            now = OLD_VALUES.get(key, {}).get(value) if isinstance(value, str) else None
            hint = "" if now is None else f" For {shown(value)}, of an older version, write {shown(now)}."
            yield Mistake(_must_be(wanted, key, value, source) + hint, key, spoils=(key,))
        else:
            setattr(target, name, _converted(value, kinds[name]))


def _wrong_type(value: Any, kind: Any) -> str:
    """Return what a value of this type must be, if it is something else; otherwise ""."""
    if get_origin(kind) is tuple:
        return _wrong_list(value, kind)
    choices = get_args(kind)  # of a Literal
    if choices:
        return "" if value in choices else f"one of {_listed(choices)}"
    return "" if type(value) is kind or (kind is float and type(value) is int) else KINDS[kind]


def _wrong_list(value: Any, kind: Any) -> str:
    """Do the same for tuple[T, ...], or tuple[T, T], which has a fixed length.

    Names may not be repeated, numbers may.
    """
    item, *others = get_args(kind)
    count = 1 + len(others) if others != [...] else None
    choices, is_number = get_args(item), item in (int, float)
    items = [value] if item is str and type(value) is str else value  # one name needs no list
    types_allowed = (float, int) if item is float else (item,)
    fits = isinstance(items, list) and count in (None, len(items))
    fits = fits and all(each in choices if choices else type(each) in types_allowed for each in items)
    if fits and (is_number or len(set(items)) == len(items)):
        return ""
    wanted = _listed(choices) if choices else f"{count or ''} {SEVERAL[item]}".strip()
    return f"a list of {wanted}{'' if is_number else ' without repeats'}"


def _converted(value: Any, kind: Any) -> Any:
    """Return the value as a field of this type holds it."""
    if get_origin(kind) is tuple:
        items, item = [value] if type(value) is str else value, get_args(kind)[0]
        return tuple(map(item, items)) if item in (int, float) else tuple(items)
    return float(value) if kind is float else value


def _must_be(wanted: str, key: str, value: Any, source: str) -> str:
    kind = (KINDS | {dict: "a table", list: "a list", types.NoneType: "nothing"}).get(type(value), type(value).__name__)
    what = "" if kind == wanted or wanted.startswith("one of") else f" ({kind})"
    return f"{key} ({source}) must be {wanted}, got {shown(value)}{what}."


def _listed(choices: Iterable[Any]) -> str:
    return ", ".join(map(shown, choices))


def _parse_text(text: str, kind: Any) -> Any:
    if kind is str or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        names = [name.strip() for name in text.split(",") if name.strip()]
        return [_parse_text(name, get_args(kind)[0]) for name in names]
    if kind is float:  # also what is not TOML, but what people write: .5
        with suppress(ValueError):
            return float(text)
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"]
    return text


OLD_VALUES: dict[str, dict[str, Any]] = {
    "weights.verify": {"off": False, "log_probs": True, "bytes": True, "full": True},
}
"""A key -> values that it had in older versions -> what they are now."""


def of_older_version(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run, as it recorded it, with the values that this version has for older ones."""
    return {
        section: {
            name: OLD_VALUES.get(f"{section}.{name}", {}).get(value, value) if isinstance(value, str) else value
            for name, value in values.items()
        }
        if isinstance(values, Mapping)
        else values
        for section, values in table.items()
    }


OTHER_NAMES = {
    "rollout.n": "rollout.responses_per_prompt",
    "algorithm.name": "algorithm.advantage",
    "algorithm.adv_estimator": "algorithm.advantage",
}
"""What people of other trainers call a key -> the key."""
VERL_SECTIONS = ("actor_rollout_ref", "data", "trainer", "reward_model", "custom_reward_function", "ray_kwargs")
"""Sections of verl's config that a config here does not have."""
OF_VERL = "this is verl's config; launch/from_verl.py translates verl's commands and resolved configs"


def _unknown_key(key: str, source: str, known: list[str]) -> Mistake:
    if key.partition(".")[0] in VERL_SECTIONS:
        return Mistake(f"{key} ({source}) is not a key of this version: {OF_VERL}.", key, spoils=(key,))
    name = key.rsplit(".", 1)[-1]
    found = (
        ([OTHER_NAMES[key]] if key in OTHER_NAMES else [])
        # actor.lr -> actor.learning_rate
        or [full for full in known if "".join(word[0] for word in full.rsplit(".", 1)[-1].split("_")) == name]
        or difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        # The same name in another section.
        or [full for full in key_types() if full.rsplit(".", 1)[-1] == name]
    )
    hint = f"the nearest is {found[0]}" if found else f"the keys there are {', '.join(known)}"
    return Mistake(f"{key} ({source}) is not a key of this version; {hint}.", key, spoils=tuple(found[:1]) or (key,))


def toml_value(value: Any) -> str:
    """Return a value as TOML. A text is JSON too, but TOML has no surrogate pairs, and wants DEL escaped."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(str(name))} = {toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
