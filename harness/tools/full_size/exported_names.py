"""The names, dtypes and shapes of somebody's export, for --names: of files, or of a function that yields tensors.

Only headers are read, and nothing is unpickled. A function is called in a process of its own: what it leaves behind,
such as a process group, ends there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.layers import ConfigError
from harness.tools.engine_class.checkpoint_headers import (
    Stored,
    check_whole_model,
    read_header,
    read_headers,
    read_index,
    read_json,
)
from harness.tools.user_sender import FUNCTION, words_of, yielded_by

if TYPE_CHECKING:
    from harness.weights.tensor_view import TensorView

FORMS = (
    "a safetensors file or its index, a folder with them, the file that --json writes, or module:function, which yields"
    " (name, tensor)"
)
UNKNOWN_SHAPE = (1,)
"""The shape in which a tensor goes to the loaders of which only the name is known. They then take or refuse the name."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What FILE has: some tensors may have the same name."""

    source: str
    """FILE, as it was given."""
    tensors: tuple[tuple[str, Stored], ...]

    def __post_init__(self) -> None:
        """Raise ConfigError if they are a LoRA adapter's."""
        check_whole_model(f"--names {self.source}", dict(self.tensors))

    @property
    def without_shape(self) -> frozenset[str]:
        """The names of which neither dtype nor shape is known."""
        return frozenset(name for name, each in self.tensors if each.shape is None)

    def completed(self, known: Mapping[str, "TensorView"]) -> "Export":
        """Return the export with dtype and shape of these tensors where it has the name alone."""
        tensors = tuple(
            (name, Stored(dtype=dtype_name(known[name].dtype), shape=known[name].shape))
            if each.shape is None and name in known
            else (name, each)
            for name, each in self.tensors
        )
        return replace(self, tensors=tensors)

    def views(self) -> "tuple[TensorView, ...]":
        """Return the tensors as a sync would send them, each whole and contiguous. Raise ConfigError for a dtype that
        torch lacks.
        """
        seen = Counter[str]()
        views = []
        for name, each in self.tensors:
            again = f"again{seen[name]}." if seen[name] else ""  # another tensor of the sender, with the same name
            seen[name] += 1
            views.append(_view(name, again + name, each))
        return tuple(views)


def read_export(source: str) -> Export | None:
    """Return what a file or folder has, and None for module:function, which is called once torch is imported.

    Raise ConfigError for what is none of these, or cannot be read.
    """
    path = Path(source)
    if path.is_dir():
        stored = read_headers(path)
    elif path.is_file():
        stored = _read_file(path)
    elif FUNCTION.fullmatch(source):
        return None
    else:
        raise ConfigError(f"--names must be {FORMS}; got {source}, and there is no such file.")
    if not stored:
        raise ConfigError(f"--names {source} has no tensors; give {FORMS}.")
    return Export(source=source, tensors=tuple(stored.items()))


def _read_file(path: Path) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
        return read_header(path)
    if path.suffix != ".json":
        raise ConfigError(f"--names must be {FORMS}; got {path}. No other format is read.")
    found = read_json(path.read_bytes(), path)
    if "weight_map" in found:
        return read_index(path)
    sent = found.get("sent")
    if not isinstance(sent, dict):
        raise ConfigError(f"--names {path} must have weight_map, as an index, or sent, as the file that --json writes.")
    return {name: _of_json(name, each, path) for name, each in sent.items()}


def _of_json(name: str, each: Any, path: Path) -> Stored:
    match each:
        case [str(dtype), list(shape)] if all(type(size) is int and size >= 0 for size in shape):
            return Stored(dtype=dtype, shape=tuple(shape))
    raise ConfigError(
        f'sent in {path} must have for each name a dtype and a shape, such as ["bfloat16", [8, 8]]; {name} has {each}.'
    )


def call_function(source: str) -> Export:
    """Return the names, dtypes and shapes that module:function yields, from the current directory.

    A tensor may be on the meta device, and a DTensor counts as the whole. Raise ConfigError with the words of what the
    function raises.
    """
    from harness.tools.engine_class.forks import ForkEnded, in_forks

    try:
        found = in_forks(_call, {0: (source,)}, 1, "names")[0]
    except ForkEnded as ended:
        raise ConfigError(
            f"--names {source}: its process ended with exit code {ended.code} before it answered."
        ) from None
    if isinstance(found, str):
        raise ConfigError(f"--names {source}: {found}")
    if not found:
        raise ConfigError(f"--names {source}: it yields no tensor.")
    return Export(source=source, tensors=tuple(found))


def _call(source: str) -> list[tuple[str, Stored]] | str:
    """Return what the function yields without values, or a sentence with what it raised."""
    import torch

    torch.set_num_threads(1)  # threads that torch started before the fork are not here
    try:
        with yielded_by(source) as pairs:
            return list(_without_values(pairs))
    except (Exception, SystemExit) as error:  # whatever the user's own code raises: it is the answer
        return words_of(error)


def _without_values(pairs: Any) -> Iterator[tuple[str, Stored]]:
    for pair in pairs.items() if isinstance(pairs, dict) else pairs:
        match pair:
            case (str(name), tensor) if hasattr(tensor, "dtype") and hasattr(tensor, "shape"):
                yield name, Stored(dtype=dtype_name(tensor.dtype), shape=tuple(map(int, tensor.shape)))
            case _:
                raise TypeError(f"it must yield (name, tensor), got {str(pair)[:80]}")


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def _view(name: str, of: str, stored: Stored) -> "TensorView":
    import torch

    from harness.weights.tensor_view import TensorView

    dtype = getattr(torch, stored.dtype or "bfloat16", None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--names: {name} has dtype {stored.dtype}, which this torch does not have.")
    return TensorView.whole(name, dtype, UNKNOWN_SHAPE if stored.shape is None else stored.shape, of)
