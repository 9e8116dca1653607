"""One record of what is wrong with a tensor on its way into an engine, and the sentences that are made of it.

What a sync refuses before it sends, what launch/full_size.py finds at true size, what two releases answer otherwise, and
what launch/verify.py finds in a server are findings; who looks for one reads its fields.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.runtime.ranks import runs
from harness.weights.layer_names import DECODER_LAYER, NO_LAYER, at_layer, layer_of
from harness.weights.tensor_view import NUMBER, without_numbers

SAID = {
    # a checkpoint tensor, as the engine's loader takes it
    "refused": "the engine's loader refuses it: {error}",
    "unknown": "the engine knows no such parameter and would ignore it",
    "twice": "sent {times} times, and the engine keeps the last of them",
    "short": "sent as {shape}, which is too short for the engine's {into}: it would make {zeros} elements zero, and no size"
    " in its config explains them",
    "one short": "one of these is too short for the engine's {into}: it would make {zeros} elements zero, and no size in"
    " its config explains them",
    "rounded": "sent as {sent}, but the engine holds {held}: it would be rounded; send {held}",
    "read in part": "of its {elements} elements ({shape}) the engine would read {read}; its shape is not the engine's",
    "reshaped": "the engine reads its {shape} as another shape of as many elements, so each would be in a wrong place",
    "transposed": "sent transposed, which no loader can tell, as it is square",
    # a parameter of the engine
    "unfilled": "a parameter of the engine that nothing sent would fill",
    "filled in part": "a parameter of the engine that nothing sent would fill, in {missing} of its {elements} elements",
    "lacking": "on engine rank {ranks} nothing sent would fill {missing} of its {elements} elements",
    "expert lost": "on engine rank {ranks} nothing sent would fill {missing} of its {elements} elements: {experts}"
    " expert(s) whole",
    "ignored": "filled on engine rank {filled}, but the loader of engine rank {ranks} ignores it",
    "ignored or padding": "filled on engine rank {filled}, but the loader of engine rank {ranks} ignores it, or it holds"
    " padding",
    "written twice": "{first} and {second} fill the same elements of it{where}; the engine keeps the second",
    "once": "SGLang can load weights into this model only once: when its loader ends, {why}",
    # an export, or a checkpoint beside config.json, against what is expected
    "unread": "{form}no rank's loader reads it",
    "no such name": "{form}the loader refuses it: {error}",
    "unsent": "{form}fills {into}",
    "misshapen": "{sent}, {why}",
    "other form": "sent as {sent}, expected {expected}{relation}",
    "passed over": "{why}",
    "not stored": "sent by the trainer, but the checkpoint beside config.json lacks it",
    "not sent": "in the checkpoint beside config.json, but the trainer's class has no such tensor, and sends none",
    "stored in another shape": "{stored} in the checkpoint, but {shape} by its config.json",
    "stored in another dtype": "{stored} in the checkpoint, but sent as {sent}",
    # two releases, and a server
    "only": "{where}, {form}{on}",
    "changed": "{before} -> {form}{on}",
    "differs": "differs on {place}: {why}{filled}",
    "not followed": "cannot be followed with {where}",
    "named": "",
}
"""Kind of a finding -> what is said of its tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, or other, with one tensor, or with several together."""

    kind: str
    """A key of SAID."""
    tensor: str
    """The checkpoint's name or the engine's, as the kind says; "" if it is about the model."""
    names: tuple[str, ...] = ()
    """Further tensors, if it is known only that something is wrong with all of them together."""
    ranks: tuple[int, ...] = ()
    """Of the engine, if it is so on these and not on others."""
    layers: tuple[int, ...] = ()
    """Further decoder layers, whose own tensor has the same fault."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """What the sentence names besides: numbers, shapes, dtypes, an error's own words."""

    @property
    def every(self) -> list[str]:
        """All tensors that it is about."""
        named = (self.tensor, *self.names)
        return [*named, *(at_layer(name, layer) for layer in self.layers for name in named)]

    @property
    def about(self) -> str:
        """What is said of the tensor."""
        return SAID[self.kind].format(ranks=", ".join(map(str, self.ranks)), **self.counts)

    def __str__(self) -> str:
        return ": ".join(filter(None, (", ".join((self.tensor, *self.names)), self.about)))

    def table(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return asdict(self)

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> "Finding":
        """Return the finding that `table` has written."""
        several = {name: tuple(table[name]) for name in ("names", "ranks", "layers")}
        return cls(kind=table["kind"], tensor=table["tensor"], counts=table["counts"], **several)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Findings of tensors whose names differ in numbers alone, and of which the same is said."""

    findings: tuple[Finding, ...]

    @property
    def count(self) -> int:
        """How many tensors they are."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        return [name for each in self.findings for name in each.every]

    @property
    def layers(self) -> list[int]:
        """The decoder layers of these tensors."""
        return sorted({layer for name in self.names if (layer := layer_of(name)) != NO_LAYER})

    def table(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return {"name": self.findings[0].tensor, "count": self.count, "about": self.findings[0].about}

    def __str__(self) -> str:
        like = f"; and {self.count - 1:,} like it" if self.count > 1 else ""
        where = f" (layers {runs(self.layers)})" if like and len(self.layers) > 1 else ""
        return f"{self.findings[0]}{like}{where}"


def grouped(findings: Iterable[Finding], alike: Callable[[str], str] = without_numbers) -> list[Line]:
    """Return one line for all findings of tensors that are alike, and of which the same is said but for the layer.

    alike: returns what tensors have in common of which one line tells.
    """
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for each in findings:
        counts = [DECODER_LAYER.sub(r"\1.*", str(value)) for value in each.counts.values()]
        groups.setdefault((each.kind, alike(each.tensor), each.names, each.ranks, *counts), []).append(each)
    ordered = (sorted(members, key=lambda each: numbers_in(each.tensor)) for members in groups.values())
    return [Line(findings=tuple(members)) for members in ordered]


def shown(lines: Sequence[object], most: int) -> list[str]:
    """Return the first lines as text, and how many more there are."""
    more = [f"... and {len(lines) - most} more lines like these"] if len(lines) > most else []
    return [*map(str, lines[:most]), *more]


def numbers_in(name: str) -> list[int]:
    return [int(number) for number in NUMBER.findall(name)]
