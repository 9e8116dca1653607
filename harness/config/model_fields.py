"""The fields of a model's config.json: in a folder, on the hub, or those that a tiny model will have.

Read without transformers, so that --dry-run and the checks before a run answer at once.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.facts import Device
from harness.config.layers import ConfigError
from harness.task.tiny_models import CONFIG_CLASSES, is_tiny, tiny_fields

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WEIGHT_INDEX = "model.safetensors.index.json"
"""The file of a checkpoint that says which of its files holds each tensor."""


def is_hub_model(name: str) -> bool:
    """Return whether model.name is the id of a model on the hub: OWNER/NAME, and not an existing path."""
    return not is_tiny(name) and not Path(name).exists() and HUB_ID.fullmatch(name) is not None


def model_fields(
    name: str, overrides: Mapping[str, Any], device: Device, *, download: bool = False
) -> Mapping[str, Any] | None:
    """Return the fields that model.name's config.json has, or None for a hub's model that is not in this machine's
    cache.

    device: where it will run, which decides the sizes of a tiny model. download: fetch the config.json of a hub's
    model. Raise ConfigError for a folder without a valid config.json, and for a download that HF_HUB_OFFLINE forbids.
    """
    if is_tiny(name):
        kind, _ = CONFIG_CLASSES[name]
        return {"model_type": kind} | tiny_fields(name, device) | dict(overrides)
    if Path(name).exists():
        return json_object(Path(name) / "config.json")
    if file := _hub_file(name, "config.json", download):
        return json_object(file)
    if download and importlib.util.find_spec("huggingface_hub"):
        raise ConfigError(
            f'model.name = "{name}" is not a folder here, and its config.json is not in the cache of the hub;'
            " HF_HUB_OFFLINE forbids to download it, or the hub does not have it. Unset that, or give a folder."
        )
    return None


def fields_of_file(name: str, file: str, *, download: bool) -> Mapping[str, Any]:
    """Return what a JSON file has that a model may have, in a folder or on the hub; nothing if there is none.

    download: fetch it from the hub, if this machine's cache lacks it. Raise ConfigError for a file that is no JSON
    object.
    """
    path = _hub_file(name, file, download) if is_hub_model(name) else Path(name) / file
    return json_object(path) if path and path.is_file() else {}


def json_object(file: Path) -> Mapping[str, Any]:
    """Return what a JSON file holds. Raise ConfigError for one that cannot be read, or that is no JSON object."""
    try:
        if file.exists() and not file.is_file():  # a pipe would never end
            raise ConfigError(f"{file} must be a JSON object, and is no regular file.")
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{file} must be a JSON object, and is nested too deeply to be read.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} must be a JSON object, and is not: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object, got {type(found).__name__}.")
    return found


def _hub_file(name: str, file: str, download: bool) -> Path | None:
    """Return a file of a hub's model in the cache of this machine; None if it is not there."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return Path(hf_hub_download(name, file, local_files_only=not download))
    except EntryNotFoundError:  # here, or on the hub
        return None
