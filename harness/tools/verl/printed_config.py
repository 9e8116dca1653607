"""The config that `python3 -m verl.trainer.main_ppo ... --cfg job --resolve` prints, as a value for each key."""

import re
from collections.abc import Mapping
from typing import Any

from harness.config.layers import ConfigError


def is_printed_config(text: str) -> bool:
    """Return whether a text is such a config, and not a script."""
    return re.search(r"^actor_rollout_ref:\s*$", text, re.MULTILINE) is not None


def values_of(text: str, name: str) -> dict[str, Any]:
    """Return the value of each key. Lines that other software printed before the config are left out.

    name: the file, for the error. Raise ConfigError if the text is not YAML, or not a table.
    """
    import yaml  # after the script has asked for an environment that has it

    first = re.search(r"^\w+:( \S*)?$", text, re.MULTILINE)
    try:
        table = yaml.safe_load(text[first.start() if first else 0 :])
    except yaml.YAMLError as error:
        where = str(error).replace("\n", " ")
        raise ConfigError(f"{name} is not the YAML that verl prints: {where}; print it again to a file.") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is not the YAML that verl prints, which has a table actor_rollout_ref.")
    return _flat(table)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values below a table. _target_ names the class that verl makes of a table; it is no setting."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if name == "_target_":
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
