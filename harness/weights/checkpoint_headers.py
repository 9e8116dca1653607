"""What a checkpoint in safetensors holds, by the headers of its files: names, dtypes, shapes and where the bytes are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError
from harness.config.model_fields import WEIGHT_INDEX

DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "U8": "uint8", "I8": "int8", "I32": "int32", "I64": "int64", "BOOL": "bool",
}  # fmt: skip
"""What a header calls a dtype -> torch's name."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a checkpoint. Where a file of the index is not there, only its name is known."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    file: Path | None = None
    """The file that holds it; None if that file is not there."""
    start: int = 0
    """Bytes of the file before the first element."""


def read_headers(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name. Only headers are read.

    Raise ConfigError for a file that is broken.
    """
    index = folder / WEIGHT_INDEX
    named: Mapping[str, str] = _json(index.read_bytes(), index).get("weight_map", {}) if index.is_file() else {}
    files = [folder / file for file in sorted(set(named.values()))] if named else sorted(folder.glob("*.safetensors"))
    stored = {name: Stored() for name in named if not (folder / named[name]).is_file()}
    for file in files:
        if file.is_file():
            stored |= read_header(file)
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of one safetensors file by name. Raise ConfigError if it is broken."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            raise ConfigError(f"{file} must be a safetensors file, but it is shorter than its header.")
        header = _json(opened.read(length), file)
    stored = {}
    for name, each in header.items():
        if name == "__metadata__":
            continue
        start, _ = each["data_offsets"]
        dtype, shape = DTYPES.get(each["dtype"], each["dtype"]), tuple(each["shape"])
        stored[name] = Stored(dtype=dtype, shape=shape, file=file, start=8 + length + start)
    return stored


def _json(text: bytes, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as safetensors or its index: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(found).__name__}.")
    return found
