"""The fields of a model's config.json: in a folder, on the hub, or those that a tiny model will have.

Read without transformers, so that --dry-run and the checks before a run answer at once.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.config.facts import Device
from harness.config.layers import ConfigError
from harness.task.tiny_models import CONFIG_CLASSES, is_tiny, tiny_fields

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_model(name: str) -> bool:
    """Return whether model.name is the id of a model on the hub: OWNER/NAME, and not an existing path."""
    return not is_tiny(name) and not Path(name).exists() and HUB_ID.fullmatch(name) is not None


def model_fields(
    name: str, overrides: Mapping[str, Any], device: Device, *, download: bool = False
) -> Mapping[str, Any] | None:
    """Return the fields that model.name's config.json has, or None for a hub's model that is not in this machine's cache.

    device: where it will run, which decides the sizes of a tiny model. download: fetch the config.json of a hub's model.
    Raise ConfigError for a folder without a valid config.json, and for a download that HF_HUB_OFFLINE forbids.
    """
    if is_tiny(name):
        kind, _ = CONFIG_CLASSES[name]
        return {"model_type": kind} | tiny_fields(name, device) | dict(overrides)
    file = Path(name) / "config.json" if Path(name).exists() else _hub_file(name, download)
    if file is None:
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f'model.name = "{name}" has no config.json that can be read: {error.strerror}.') from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file} must be a JSON object, and is not: {error}.") from error


def _hub_file(name: str, download: bool) -> Path | None:
    """Return the config.json of a hub's model in the cache of this machine; None if it is not there."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not download))
    except LocalEntryNotFoundError as error:
        if not download:
            return None
        raise ConfigError(
            f'model.name = "{name}" is not a folder here, and its config.json is not in the cache of the hub;'
            " HF_HUB_OFFLINE forbids to download it. Unset that, or give a folder."
        ) from error
