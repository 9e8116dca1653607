"""What a checkpoint in safetensors holds, by the headers of its files: names, dtypes, shapes and where the bytes are."""

import json
import re
from collections.abc import Collection, Mapping
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

LAYER = re.compile(r"\.\d+\.")
"""In the name of a tensor of one of several layers."""


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

    Raise ConfigError for a file that is broken, and for a LoRA adapter.
    """
    index = folder / WEIGHT_INDEX
    if index.is_file() and (stored := read_index(index)):
        return stored
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.is_file():
            stored |= read_header(file)
    check_whole_model(str(folder), stored)
    return stored


def check_whole_model(source: str, names: Collection[str]) -> None:
    """Raise ConfigError if the tensors of all layers are a LoRA adapter's, as a folder with adapter_config.json has
    them.
    """
    of_layers = [name for name in names if LAYER.search(name)]
    if of_layers and all(".lora_" in name for name in of_layers):
        raise ConfigError(
            f"{source} has a LoRA adapter and not a model's weights: {len(of_layers)} tensors such as {of_layers[0]}. Merge"
            " it into its base model (merge_and_unload of peft), and give what that saves."
        )


def read_index(index: Path) -> dict[str, Stored]:
    """Return the tensors that an index of safetensors files names, and those that its files have besides.

    Raise ConfigError if the index or a file is broken, or if it names a file outside of its own folder.
    """
    named: Mapping[str, str] = read_json(index.read_bytes(), index).get("weight_map", {})
    if not isinstance(named, dict) or not all(_is_beside(file) for file in named.values()):
        raise ConfigError(f"weight_map in {index} must have, for each tensor, a file of that folder.")
    stored = {name: Stored() for name in named if not (index.parent / named[name]).is_file()}
    for file in sorted(set(named.values())):
        if (index.parent / file).is_file():
            stored |= read_header(index.parent / file)
    return stored


def _is_beside(file: Any) -> bool:
    return isinstance(file, str) and not Path(file).is_absolute() and ".." not in Path(file).parts


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of one safetensors file by name. Raise ConfigError if it is broken."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            raise ConfigError(f"{file} must be a safetensors file, but it is shorter than its header.")
        header = read_json(opened.read(length), file)
    stored = {}
    for name, each in header.items():
        if name == "__metadata__":
            continue
        try:
            start, _ = each["data_offsets"]
            dtype, shape = DTYPES.get(each["dtype"], each["dtype"]), tuple(map(int, each["shape"]))
            stored[name] = Stored(dtype=dtype, shape=shape, file=file, start=8 + length + start)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{file} must have dtype, shape and data_offsets for {name}, got {each}.") from None
    return stored


def read_json(text: bytes, file: Path) -> dict[str, Any]:
    """Return the JSON object in the text of a file, or of its header. Raise ConfigError if there is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as safetensors or its index: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(found).__name__}.")
    return found
