"""The decoder layer of a tensor, by its name; and which layers are of one kind, so that one can stand for its like."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.weights.fusing import FusingGroup

NO_LAYER = -1
"""Stands for what is outside the decoder layers: the embedding, the last norm and the head."""
DECODER_LAYER = re.compile(r"(?:^|(?<=\.))(layers|h|blocks)\.(\d+)(?=\.)")
"""In a tensor's name: what the list of layers is called, and a number. h is GPT-2's and Falcon's, blocks DBRX's."""
TOWER = re.compile(
    r"(?:^|[._])(vision|visual|vit|vpm|image|video|audio|apm|speech|sound|projector|resampler|connector)(?:[._]|$)"
)
"""A prefix that matches belongs to a vision or audio tower, or to what joins it to the decoder. Its layers are no
decoder layers."""
Layers = Mapping[int, Sequence[FusingGroup]]
"""What is sent, by decoder layer."""


def layer_of(name: str) -> int:
    """Return the decoder layer of a tensor of the language model, by its name; NO_LAYER for any other."""
    found = _decoder_layer(name)
    return int(found[2]) if found else NO_LAYER


def without_layer(name: str) -> str:
    """Return a tensor's name without the number of its decoder layer."""
    found = _decoder_layer(name)
    return f"{name[: found.start()]}{found[1]}.*{name[found.end() :]}" if found else name


def at_layer(name: str, layer: int) -> str:
    """Return the name that the same tensor has in another decoder layer."""
    found = _decoder_layer(name)
    return f"{name[: found.start(2)]}{layer}{name[found.end(2) :]}" if found else name


def _decoder_layer(name: str) -> re.Match[str] | None:
    found = DECODER_LAYER.search(name)
    return found if found and not TOWER.search(name[: found.start()]) else None


def by_layer(groups: Iterable[FusingGroup]) -> dict[int, list[FusingGroup]]:
    """Return the groups of each decoder layer, and of NO_LAYER."""
    layers: dict[int, list[FusingGroup]] = defaultdict(list)
    for group in groups:
        layers[layer_of(group.views[0].name)].append(group)
    return dict(sorted(layers.items()))


def kind_of(groups: Iterable[FusingGroup]) -> tuple[Any, ...]:
    """Return what layers of one kind have in common: names, dtypes, shapes, and how they lie in the trainer's
    tensors.
    """
    views = [view for group in groups for view in group.views]
    return tuple((without_layer(view.name), str(view.dtype), view.shape, view.stride, view.offset) for view in views)


def one_layer_of_each_kind(groups: Iterable[FusingGroup]) -> list[FusingGroup]:
    """Return what lies outside the layers, and the first layer of each kind."""
    kinds: dict[Any, list[FusingGroup]] = {}
    for layer, members in by_layer(groups).items():
        kinds.setdefault(NO_LAYER if layer == NO_LAYER else kind_of(members), members)
    return [group for members in kinds.values() for group in members]
