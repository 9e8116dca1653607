"""Models and data sets of a hub, looked up once and without retries, before ranks start."""

import json
from pathlib import Path
from typing import Any, Literal

SECONDS = 10.0
"""How long the hub may take to answer one request."""


def cached_config(model: str) -> Path | None:
    """Return the config.json of a hub's model in the local cache, None where it is missing; no network."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    found = try_to_load_from_cache(model, "config.json")
    return Path(found) if isinstance(found, str) else None


def look_up(kind: Literal["model", "dataset"], name: str) -> None:
    """Ask the hub for it once. Nothing under HF_HUB_OFFLINE, where the cache decides.

    Raises ValueError, the end of a sentence, where the hub does not have it, or does not answer: every later request of
    every rank would be retried for a minute.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    except Exception as error:  # of the hub's client, of its HTTP library, of sockets, by release
        cause = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        raise ValueError(
            f"{constants.ENDPOINT} was asked once for this {kind} ({type(error).__name__}: {cause}); give a folder, or set"
            " HF_HUB_OFFLINE=1 to use what is in the cache"
        ) from error


def model_fields(name: str) -> dict[str, Any]:
    """Return the config of a hub's model, downloaded where it is not in the cache. Raise ValueError as look_up."""
    look_up("model", name)
    found = cached_config(name)
    if found is None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = Path(hf_hub_download(name, "config.json"))
        except LocalEntryNotFoundError as error:
            raise ValueError("HF_HUB_OFFLINE is set, and its config.json is not in the cache") from error
    fields: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return fields
