"""Which zeros of an engine its configuration explains.

SGLang's loaders fill with zeros what a tensor is too short for. That is right where a size does not divide over the
ranks, and wrong where a trainer sends one rank's shard as the whole tensor.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

ALIGNMENTS = tuple(1 << power for power in range(9))
"""To multiples of which SGLang enlarges the share of a rank: 1 up to the 256 rows of its kernels for experts."""
ORIGINAL = {"original_total_num_kv_heads": "num_key_value_heads"}
"""What SGLang's CPU mode calls a size before it enlarged it -> the size. Others have the prefix original_ alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The sizes in the config of an engine's model."""

    numbers: frozenset[int] = frozenset()
    """All whole numbers there, such as an intermediate size, and the rows of vocabularies."""
    hidden: frozenset[int] = frozenset()
    """Those called hidden_size."""
    enlarged: frozenset[tuple[Any, Any]] = frozenset()
    """(size of the model, size that SGLang's CPU mode made of it), where it does not divide over the ranks."""

    @classmethod
    def of(cls, model: Any) -> "ModelSizes":
        """Return the sizes of a model of SGLang, whose modules hold the config that they were built from."""
        members = [vars(module) for module in model.modules()]
        configs = {id(each["config"]): each["config"] for each in members if "config" in each}
        tables = [table for config in configs.values() for table in _tables(config)]
        vocabularies = {each["org_vocab_size"] for each in members if "org_vocab_size" in each}
        return cls(
            numbers=frozenset(vocabularies.union(*(_numbers(table.values()) for table in tables))),
            hidden=frozenset(_numbers(table.get("hidden_size") for table in tables)),
            enlarged=frozenset(pair for table in tables for pair in _enlarged(table) if pair[0] != pair[1]),
        )

    def add_once(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor is a bias of what the ranks add up, which one of them has, and the others have
        zeros.
        """
        return name.endswith("bias") and bool(shape) and shape[-1] in self.hidden

    def explain(self, sizes: Sequence[int], filled: int, zeros: int, ranks: int) -> bool:
        """Return whether zeros are what SGLang adds to a tensor because its size does not divide.

        sizes: of the axes along which it is cut. filled, zeros: elements that so many ranks read of it, and that they
        make zero behind it.
        """
        share = Fraction(filled, filled + zeros)
        if any(share == Fraction(size, larger) for size, larger in self.enlarged):
            return True
        known = [size for size in sizes if size in self.numbers and share > Fraction(1, 2)]
        return any(_is_rounded_up(size, size / share, ranks) for size in known)


def _is_rounded_up(size: int, whole: Fraction, ranks: int) -> bool:
    """Return whether `whole` is the least multiple of some number of ranks and an alignment that the size fits into."""
    shards = [number for number in range(1, ranks + 1) if ranks % number == 0]
    return any(whole == math.ceil(size / (each * step)) * each * step for each in shards for step in ALIGNMENTS)


def _tables(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a config, and of those inside it, such as that of a vision tower."""
    table = config if isinstance(config, dict) else vars(config)
    yield table
    for value in table.values():
        if isinstance(value, dict) or hasattr(value, "model_type"):
            yield from _tables(value)


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _numbers(value)
        elif type(value) is int and value > 0:
            yield value


def _enlarged(table: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for name, value in table.items():
        if type(value) is not int:
            continue
        if name.startswith("original_") and name.endswith(("heads", "intermediate_size", "intermediate_size_mlp")):
            yield value, table.get(ORIGINAL.get(name, name.removeprefix("original_")), value)
        elif name.endswith("_cpu"):
            yield table.get(name.removesuffix("_cpu"), value), value
