"""From TOML files, layered left to right, and dotted overrides to one strictly checked Config."""

import dataclasses
import difflib
import hashlib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from harness.config.schema import Config

COMMAND_LINE = "command line"

RENAMED = {
    "memory.wake": 'memory.resume ("at_once" is now "all")',
    "model.shape": "model.overrides",
    "parallel.engine_gpus": 'parallel.colocate ("shared" is now true, "apart" is now false)',
    "run.deadlines": "run.phase_timeouts",
    "run.lost_host_seconds": "run.heartbeat_timeout",
    "task.overlong": "task.long_prompts",
    "weights.bucket_megabytes": "weights.bucket_size_mib",
}
"""Keys of 0.1's first months, and what to write now."""


class ConfigError(ValueError):
    """A user's mistake: one sentence that names the key, the value and what would be right. Exit code 2."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One source of values: a nested table, and the name that errors give it."""

    source: str
    table: Mapping[str, Any]


def read_layer(path: str) -> Layer:
    """Read one TOML file. Raises ConfigError when it is missing or is not TOML."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path} is not a file; give the path of a TOML file, such as configs/cpu/quickstart.toml.")
    try:
        return Layer(source=path, table=tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def override_layer(overrides: Iterable[tuple[str, str]]) -> Layer:
    """Turn ("actor.learning_rate", "1e-5") pairs into a layer; the field's type decides how the text is read."""
    table: dict[str, Any] = {}
    for key, text in overrides:
        parts = key.split(".")
        kind = _field_type(parts)
        _insert(table, parts, key, _parse_text(text, kind))
    return Layer(source=COMMAND_LINE, table=table)


def build_config(layers: Iterable[Layer]) -> Config:
    """Later layers win. Raises ConfigError for unknown keys and wrong types."""
    config = Config()
    for layer in layers:
        _apply(config, layer.table, layer.source, prefix="")
    return config


def to_toml(config: Config) -> str:
    """The whole config as TOML that read_layer reads back to an equal Config."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        for item in dataclasses.fields(values):
            lines.append(f"{item.name} = {_toml_value(getattr(values, item.name))}")
        lines.append("")
    return "\n".join(lines)


def digest(config: Config) -> str:
    """sha256 of the resolved config: equal on all ranks, or the ranks run different things."""
    return hashlib.sha256(to_toml(config).encode()).hexdigest()


def free_tables() -> list[str]:
    """Keys whose inner names are not the harness's, such as engine.args."""
    config = Config()
    return [
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(config)
        for item in dataclasses.fields(getattr(config, section.name))
        if isinstance(getattr(getattr(config, section.name), item.name), dict)
    ]


def _apply(target: Any, table: Mapping[str, Any], source: str, prefix: str) -> None:
    kinds = {item.name: item.type for item in dataclasses.fields(target)}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if name not in kinds:
            raise ConfigError(_unknown_key(key, source, [prefix + known for known in kinds]))
        current = getattr(target, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} = {_show(value)} ({source}) is {_kind_of(value)}; it must be a table.")
            _apply(current, value, source, prefix=f"{key}.")
        elif isinstance(current, dict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} = {_show(value)} ({source}) is {_kind_of(value)}; it must be a table.")
            setattr(target, name, current | dict(value))
        else:
            setattr(target, name, _checked(key, value, kinds[name], source))


def _checked(key: str, value: Any, kind: Any, source: str) -> Any:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            listed = ", ".join(json.dumps(choice) for choice in choices)
            raise ConfigError(f"{key} = {_show(value)} ({source}) is not one of {listed}.")
        return value
    if get_origin(kind) is tuple:
        return _checked_names(key, value, get_args(get_args(kind)[0]), source)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{key} = {_show(value)} ({source}) is {_kind_of(value)}; it must be {_KINDS[kind]}.")
    return value


def _checked_names(key: str, value: Any, choices: tuple[Any, ...], source: str) -> tuple[Any, ...]:
    """A list of some of the choices, each at most once; where there are no choices, of any strings."""
    listed = ", ".join(json.dumps(choice) for choice in choices) or "strings"
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} = {_show(value)} ({source}) is {_kind_of(value)}; it must be a list of {listed}.")
    for position, name in enumerate(value):
        if name not in (choices or (name,)) or not isinstance(name, str):
            raise ConfigError(f"{key} = {_show(value)} ({source}) has {_show(name)}; its values can be {listed}.")
        if name in value[:position]:
            raise ConfigError(f"{key} = {_show(value)} ({source}) has {_show(name)} twice; give it once.")
    return tuple(value)


def _field_type(parts: list[str]) -> Any:
    """The declared type at a dotted key; None where it is unknown or inside a free table such as engine.args."""
    target: Any = Config()
    for position, name in enumerate(parts):
        kinds = {item.name: item.type for item in dataclasses.fields(target)}
        if name not in kinds:
            return None
        current = getattr(target, name)
        if not dataclasses.is_dataclass(current):
            return None if position + 1 < len(parts) else kinds[name]
        target = current
    return None


def _parse_text(text: str, kind: Any) -> Any:
    if kind is str or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is tuple and not text.lstrip().startswith("["):
        return [name.strip() for name in text.split(",") if name.strip()]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if kind is float and isinstance(value, str):  # not TOML, but what people write: .5
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _insert(table: dict[str, Any], parts: list[str], key: str, value: Any) -> None:
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--{key} ({COMMAND_LINE}) goes inside a value that another option sets; give one of them."
            )
    before = table.get(parts[-1])
    table[parts[-1]] = before | value if isinstance(before, dict) and isinstance(value, dict) else value


def _unknown_key(key: str, source: str, known: list[str]) -> str:
    if key in RENAMED:
        return f"{key} ({source}) was renamed: use {RENAMED[key]}."
    name = key.rsplit(".", 1)[-1]
    match = [full for full in known if _initials(full) == name] or difflib.get_close_matches(
        key, known, n=1, cutoff=0.75
    )
    if not match:  # a key that is right, but in another section
        match = [full for full in all_keys() if full.rsplit(".", 1)[-1] == name][:1]
    if not match and "." in key:  # the name of a section looks like no key
        match = difflib.get_close_matches(key, all_keys(), n=1, cutoff=0.5)
    hint = f"the nearest is {match[0]}" if match else f"the keys there are {', '.join(known)}"
    return f"{key} ({source}) is not a key; {hint}."


def _initials(key: str) -> str:
    """actor.learning_rate -> lr, as many write it."""
    return "".join(word[0] for word in key.rsplit(".", 1)[-1].split("_"))


def all_keys() -> list[str]:
    """Return every dotted key that a config file or an override may set."""
    config = Config()
    return [
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(config)
        for item in dataclasses.fields(getattr(config, section.name))
    ]


_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _kind_of(value: Any) -> str:
    names = _KINDS | {dict: "a table", list: "a list", types.NoneType: "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _show(value: Any) -> str:
    return json.dumps(value, default=str)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml_string(name)} = {_toml_value(item)}" for name, item in value.items())
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_string(value)
    return repr(value)


def _toml_string(text: str) -> str:
    """A JSON string is a TOML basic string, but for JSON's surrogate pairs and for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
