"""A host's clock set wrong, by libfaketime: Linux has one real-time clock for all namespaces."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from harness.runtime.errors import UnsupportedEnvironment

DISTRIBUTION, LIBRARY = "libfaketime", "libfaketime.so.1"


def skewed(seconds: float, current: Mapping[str, str]) -> dict[str, str]:
    """Variables under which the real-time clock of a program and its children is off by this much.

    Monotonic clocks stay true, by which timeouts and sleeps go, and so do the times of files, which are the disk's.
    Raises UnsupportedEnvironment where libfaketime is not installed.
    """
    preload = [str(library()), *filter(None, [current.get("LD_PRELOAD")])]
    return {
        "LD_PRELOAD": ":".join(preload),
        "FAKETIME": f"{seconds:+g}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "FAKETIME_NO_CACHE": "1",
    }


def library() -> Path:
    """libfaketime's shared object. Raises UnsupportedEnvironment."""
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise UnsupportedEnvironment(f"--skew needs the package {DISTRIBUTION}, which is not installed here.") from None
    found = next((Path(str(file.locate())) for file in files if file.name == LIBRARY), None)
    if found is None or not found.exists():
        raise UnsupportedEnvironment(
            f"--skew needs {LIBRARY} of the package {DISTRIBUTION}, which has none for this machine."
        )
    return found
