"""The three lists of --names: what an export has and the engine does not expect, the reverse, and other shapes.

What is expected is what the engine's own loaders read. So a name that they rename, fuse or take whole is expected,
whoever gave it, and one that they ignore is not, whatever transformers calls it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.tools.full_size.exported_names import dtype_name
from harness.tools.full_size.findings import Findings
from harness.tools.full_size.ranks_at_true_size import NO_LAYER, EngineRank, at_layer, by_layer, kind_of, layer_of
from harness.weights.fusing import fusing_groups
from harness.weights.tensor_view import NUMBER, TensorView, without_numbers

SHOWN = 12
"""How many lines of each list are printed; the JSON has all."""
UNKNOWN_NAME = ("KeyError", "AttributeError")
"""What a loader raises for a name that it looks up and does not find."""
Fills = Mapping[str, Collection[str]]
"""Parameter of the engine -> checkpoint names that fill it, both without their numbers."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Names that differ in numbers alone and of which the same is said."""

    names: tuple[str, ...]
    about: str

    def __str__(self) -> str:
        like = f"; and {len(self.names) - 1:,} like it" if len(self.names) > 1 else ""
        return f"{self.names[0]}: {self.about}{like}"

    def as_json(self) -> dict[str, Any]:
        """Return the line as an entry of the JSON."""
        return {"name": self.names[0], "count": len(self.names), "about": self.about}


@dataclass(frozen=True, kw_only=True)
class NameLists:
    """What an export has otherwise than the engine."""

    unexpected: tuple[Line, ...] = ()
    """Sent and not expected."""
    unsent: tuple[Line, ...] = ()
    """Expected and not sent."""
    misshapen: tuple[Line, ...] = ()
    """Of another shape, or of a dtype that loses bits."""
    by_design: tuple[Line, ...] = ()
    """What published checkpoints have too, and the engine passes over. It is no problem."""

    def __add__(self, other: "NameLists") -> "NameLists":
        """Return both: those of the target model, and of its draft model."""
        return NameLists(
            unexpected=self.unexpected + other.unexpected,
            unsent=self.unsent + other.unsent,
            misshapen=self.misshapen + other.misshapen,
            by_design=self.by_design + other.by_design,
        )

    @property
    def titles(self) -> dict[str, tuple[Line, ...]]:
        """The lists by what they are called."""
        return {
            "sent and not expected": self.unexpected,
            "expected and not sent": self.unsent,
            "other shapes or dtypes": self.misshapen,
        }

    @property
    def wrong(self) -> tuple[Line, ...]:
        """The lines of all three."""
        return tuple(line for lines in self.titles.values() for line in lines)

    def as_lines(self) -> Iterator[str]:
        """Yield what is printed."""
        for title, lines in self.titles.items():
            more = f", of which {SHOWN} are shown" if len(lines) > SHOWN else ""
            yield f"{title}: {f'{count_of(lines):,} name(s) of {len(lines)} kind(s){more}' if lines else 'none'}"
            yield from (f"  {line}" for line in lines[:SHOWN])
        for line in self.by_design:
            yield f"passed over by the engine, as it should: {line}"

    def table(self) -> dict[str, list[dict[str, Any]]]:
        """Return the lists for the JSON."""
        named = {**self.titles, "passed over": self.by_design}
        return {title.replace(" ", "_"): [line.as_json() for line in lines] for title, lines in named.items()}

    def counts(self) -> str:
        """Return how many names are wrong, list by list."""
        return ", ".join(f"{count_of(lines):,} {title}" for title, lines in self.titles.items() if lines)


def count_of(lines: Iterable[Line]) -> int:
    """Return how many names lines have."""
    return sum(len(line.names) for line in lines)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is known of the names that the engine would take."""

    tensors: Mapping[str, TensorView] = field(default_factory=dict)
    """By name, as transformers' class would save them, and those of an MTP layer; none if it has no such class."""
    by_design: Mapping[str, str] = field(default_factory=dict)
    """Names of the export that the engine passes over as those of published checkpoints -> what they are."""
    without_shape: Collection[str] = ()
    """Names of the export of which no shape is known: they are only taken or not."""

    def other_sizes(self, sent: Iterable[TensorView]) -> dict[str, str]:
        """Return the names that have more or fewer elements than transformers' class has -> what is said of them.

        Not every loader complains: gpt-oss's fills what it can of half a bias, and leaves the rest as padding.
        """
        known = {view.name: (view, self.tensors[view.name]) for view in sent if view.name in self.tensors}
        return {
            name: f"sent as {list(view.shape)}, expected {list(due.shape)}"
            for name, (view, due) in known.items()
            if view.numel != due.numel and name not in self.by_design
        }


def lists_of(
    sent: Sequence[TensorView], ranks: Sequence[EngineRank], findings: Findings, expected: Expected, fills: Fills
) -> NameLists:
    """Return the lists for what was given to the ranks of an engine."""
    alike = _Alike.of(sent, ranks)
    refused = {name: error for names, error in findings.refused.items() for name in names.split(", ")}
    no_such = {
        name for name, error in refused.items() if error.startswith(UNKNOWN_NAME) and name not in expected.tensors
    }
    unread = alike.whole({name: "no rank's loader reads it" for name in findings.unread})
    passed_over = [(name, expected.by_design[name]) for name in unread if name in expected.by_design]
    unread = {name: said for name, said in unread.items() if name not in expected.by_design}
    said_of = {name: f"the loader refuses it: {refused[name]}" for name in no_such}
    unread |= alike.whole(said_of) | {view.name: said_of[view.name] for view in sent if view.name in said_of}
    wrong_shape = {name: f"the loader refuses it: {refused[name]}" for name in refused.keys() - no_such}
    for sentence in findings.misfits:
        names, _, about = sentence.partition(": ")
        wrong_shape |= {name: about for name in names.split(", ") if name not in wrong_shape}
    views = {view.name: view for view in sent}
    wrong_shape = {
        name: about for name, about in alike.whole(wrong_shape).items() if name not in expected.without_shape
    }
    wrong_shape = expected.other_sizes(view for view in sent if view.name not in unread) | wrong_shape
    lost = {*wrong_shape, *unread, *expected.without_shape}
    unfilled = _unfilled(views, findings.lacking, alike, expected, fills, lost)
    return NameLists(
        unexpected=tuple(grouped((name, f"{_shape(views[name], expected)}{about}") for name, about in unread.items())),
        by_design=tuple(grouped(passed_over, kind=lambda name: "")),
        unsent=tuple(grouped(unfilled.items())),
        misshapen=tuple(
            grouped(
                (name, _unlike(views[name], expected.tensors.get(name), about))
                for name, about in wrong_shape.items()
                if name in views
            )
        ),
    )


def fills_of(ranks: Iterable[EngineRank]) -> dict[str, set[str]]:
    """Return which names the loaders read into which parameters, or would if they had another shape."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, into in (each for rank in ranks for each in rank.coverage.aimed.items()):
        found[without_numbers(into)].add(without_numbers(name))
    for copy in (copy for each in ranks for copies in each.coverage.copies for copy in copies):
        found[without_numbers(copy.into)].add(without_numbers(copy.source.name))
    return found


def grouped(found: Iterable[tuple[str, str]], kind: Callable[[str], str] = without_numbers) -> Iterator[Line]:
    """Yield one line for all names of a kind of which the same is said, by (name, what is said of it)."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, about in found:
        groups[kind(name), re.sub(r"(?<=\.)\d+(?=\.)", "*", about)].append((name, about))
    for members in groups.values():
        members.sort(key=lambda member: [int(number) for number in NUMBER.findall(member[0])])
        yield Line(names=tuple(name for name, _ in members), about=members[0][1])


@dataclass(frozen=True, kw_only=True)
class _Alike:
    """Which layers stand for which, so that what is said of one can be said of all."""

    sent: Sequence[TensorView]
    stands: Mapping[int, int]
    """Decoder layer -> the layer that tells of it."""

    @classmethod
    def of(cls, sent: Sequence[TensorView], ranks: Sequence[EngineRank]) -> "_Alike":
        """Find for each layer that no rank told of the nearest one before it that was of the same kind."""
        kinds = {layer: kind_of(members) for layer, members in by_layer(fusing_groups(sent)).items()}
        told = frozenset[int]().union(*(each.layers for each in ranks))
        odd = frozenset[int]().union(*(each.odd for each in ranks))
        silent = frozenset[int]().union(*(each.held_layers for each in ranks)) - told
        stands = {}
        for layer, kind in kinds.items():
            before = [each for each in told if each < layer and each not in odd and kinds.get(each) == kind]
            stands[layer] = max(before) if layer in silent and before else layer
        return cls(sent=sent, stands=stands)

    def whole(self, said: Mapping[str, str]) -> dict[str, str]:
        """Return what is said of the names of all layers, in the order in which they are sent."""
        found = {}
        for view in self.sent:
            layer = layer_of(view.name)
            name = at_layer(view.name, self.stands.get(layer, layer)) if layer != NO_LAYER else view.name
            if name in said:
                found[view.name] = said[name].replace(name, view.name)
        return found

    def layers(self, parameter: str) -> list[int]:
        """Return the layers of which a parameter tells; none if it is of no layer."""
        layer = layer_of(parameter)
        return [] if layer == NO_LAYER else [layer, *(each for each, of in self.stands.items() if of == layer != each)]


def _unfilled(
    sent: Mapping[str, TensorView],
    lacking: Mapping[str, str],
    alike: _Alike,
    expected: Expected,
    fills: Fills,
    lost: Collection[str],
) -> dict[str, str]:
    """Return the name that would fill an unfilled parameter, or the parameter itself where none is known -> what is
    said of it.

    lost: names that do not arrive, which tell by themselves what they leave unfilled, or of which no shape is known.
    """
    of_pattern: dict[str, list[str]] = defaultdict(list)
    for name in expected.tensors or sent:
        of_pattern[without_numbers(name)].append(name)
    found: dict[str, str] = {}
    for parameter, said in lacking.items():
        patterns, layers = fills.get(without_numbers(parameter), ()), alike.layers(parameter)
        names = [name for pattern, members in of_pattern.items() if pattern in patterns for name in members]
        if not expected.tensors:  # those of other layers tell what this one lacks
            of_one = dict.fromkeys(at_layer(name, 0) for name in names)
            names = [at_layer(name, layer) for name in of_one for layer in layers] or names
        names = [name for name in names if _is_of(name, parameter, layers)]
        due = [name for name in names if name not in sent]
        for name in due:
            view = expected.tensors.get(name)
            found.setdefault(name, f"{_form(view)}, fills {parameter}" if view else f"fills {parameter}")
        if not due and not any(name in lost for name in names):
            found[parameter] = said
    return found


def _is_of(name: str, parameter: str, layers: Collection[int]) -> bool:
    """Return whether a name has the numbers of a parameter, or of one that it tells of."""
    own, numbers = NUMBER.findall(parameter), NUMBER.findall(name)
    if layers and own and numbers:
        return int(numbers[0]) in layers and numbers[1 : len(own)] == own[1:]
    return numbers[: len(own)] == own


def _form(view: TensorView) -> str:
    return f"{dtype_name(view.dtype)} {list(view.shape)}"


def _shape(view: TensorView, expected: Expected) -> str:
    return "" if view.name in expected.without_shape else f"{_form(view)}, "


def _unlike(sent: TensorView, expected: TensorView | None, about: str) -> str:
    """Return how a tensor differs from what transformers' class has, or else what the loaders say of it."""
    if expected is None or sent.shape == expected.shape:
        return f"{list(sent.shape)}, {about}" if about.startswith("sent as") else f"{_form(sent)}, {about}"
    return f"sent as {_form(sent)}, expected {_form(expected)}{_relation(sent.shape, expected.shape)}"


def _relation(sent: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return in words how one shape comes of the other, if that is plain."""
    if sorted(sent) == sorted(expected):
        return ": its axes are in another order" if len(sent) > 2 else ": transposed"
    if len(sent) == len(expected):
        unlike = [axis for axis, (one, other) in enumerate(zip(sent, expected, strict=True)) if one != other]
        if len(unlike) == 1:
            one, other = sent[unlike[0]], expected[unlike[0]]
            if one and other % one == 0:
                return f": 1/{other // one} of axis {unlike[0]}, as a shard has"
            if other and one % other == 0:
                return f": {one // other} times axis {unlike[0]}"
            return f": axis {unlike[0]} is {abs(one - other):,} {'longer' if one > other else 'shorter'}"
    return ""
