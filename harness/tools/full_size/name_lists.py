"""The three lists of --names: what an export has and the engine does not expect, the reverse, and other shapes.

What is expected is what the engine's own loaders read. So a name that they rename, fuse or take whole is expected,
whoever gave it, and one that they ignore is not, whatever transformers calls it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.tools.engine_class.engine_answer import OF_PARAMETERS, EngineAnswer
from harness.tools.engine_class.traced_ranks import EngineRank
from harness.tools.full_size.exported_names import dtype_name
from harness.weights.findings import Finding, Line, grouped, numbers_in, shown
from harness.weights.layer_names import NO_LAYER, at_layer, layer_of
from harness.weights.tensor_view import TensorView, without_numbers

SHOWN = 12
"""How many lines of each list are printed; the JSON has all."""
UNKNOWN_NAME = ("KeyError", "AttributeError")
"""What a loader raises for a name that it looks up and does not find."""
Fills = Mapping[str, Collection[str]]
"""Parameter of the engine -> checkpoint names that fill it, both without their numbers."""


@dataclass(frozen=True, kw_only=True)
class NameLists:
    """What an export has otherwise than the engine."""

    unexpected: tuple[Finding, ...] = ()
    """Sent and not expected."""
    unsent: tuple[Finding, ...] = ()
    """Expected and not sent."""
    misshapen: tuple[Finding, ...] = ()
    """Of another shape, or of a dtype that loses bits."""
    by_design: tuple[Finding, ...] = ()
    """What published checkpoints have too, and the engine passes over. It is no problem."""

    def __add__(self, other: "NameLists") -> "NameLists":
        """Return both: those of the target model, and of its draft model."""
        return NameLists(**{name: (*mine, *getattr(other, name)) for name, mine in vars(self).items()})

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What is in one of the three lists."""
        return (*self.unexpected, *self.unsent, *self.misshapen)

    def titles(self) -> dict[str, list[Line]]:
        """Return the lists by what they are called."""
        return {
            "sent and not expected": grouped(self.unexpected),
            "expected and not sent": grouped(self.unsent),
            "other shapes or dtypes": grouped(self.misshapen),
        }

    def as_lines(self) -> Iterator[str]:
        """Yield what is printed."""
        for title, lines in self.titles().items():
            yield f"{title}: {f'{count_of(lines):,} name(s) of {len(lines)} kind(s)' if lines else 'none'}"
            yield from (f"  {line}" for line in shown(lines, SHOWN))
        for line in self._passed_over():
            yield f"passed over by the engine, as it should: {line}"

    def table(self) -> dict[str, list[dict[str, Any]]]:
        """Return the lists for the JSON."""
        named = {**self.titles(), "passed over": self._passed_over()}
        return {title.replace(" ", "_"): [line.table() for line in lines] for title, lines in named.items()}

    def _passed_over(self) -> list[Line]:
        return grouped(self.by_design, alike=lambda name: "")

    def counts(self) -> str:
        """Return how many names are wrong, list by list."""
        return ", ".join(f"{count_of(lines):,} {title}" for title, lines in self.titles().items() if lines)


def count_of(lines: Iterable[Line]) -> int:
    """Return how many names lines have."""
    return sum(line.count for line in lines)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is known of the names that the engine would take."""

    tensors: Mapping[str, TensorView] = field(default_factory=dict)
    """By name, as transformers' class would save them, and those of an MTP layer; none if it has no such class."""
    by_design: Mapping[str, str] = field(default_factory=dict)
    """Names of the export that the engine passes over as those of published checkpoints -> what they are."""
    without_shape: Collection[str] = ()
    """Names of the export of which no shape is known: they are only taken or not."""

    def has_other_size(self, view: TensorView) -> bool:
        """Return whether a tensor has more or fewer elements than transformers' class has.

        Not every loader complains: gpt-oss's fills what it can of half a bias, and leaves the rest as padding.
        """
        due = self.tensors.get(view.name)
        return bool(due and view.numel != due.numel and view.name not in self.by_design)


def lists_of(sent: Sequence[TensorView], answer: EngineAnswer, expected: Expected, fills: Fills) -> NameLists:
    """Return the lists for what was given to the ranks of an engine."""
    views = {view.name: view for view in sent}
    about = [each for each in answer.findings if each.kind not in OF_PARAMETERS]
    found = {name: each for each in reversed(about) for name in each.every if name in views}
    unexpected, misshapen = [], []
    for name, view in views.items():
        each, form = found.get(name), "" if name in expected.without_shape else f"{_form(view)}, "
        error = str(each.counts["error"]) if each and each.kind == "refused" else ""
        if each and _is_unread(each):
            unexpected.append(Finding(kind="unread", tensor=name, counts={"form": form}))
        elif error.startswith(UNKNOWN_NAME) and name not in expected.tensors:
            unexpected.append(Finding(kind="no such name", tensor=name, counts={"form": form, "error": error}))
        elif (each and name not in expected.without_shape) or expected.has_other_size(view):
            misshapen.append(_misshapen(view, expected.tensors.get(name), each.about if each else ""))
    passed_over = {name for each in answer.passed_over if _is_unread(each) for name in each.every} & views.keys()
    lost = {each.tensor for each in (*unexpected, *misshapen)} | {*expected.without_shape}
    return NameLists(
        unexpected=tuple(unexpected),
        unsent=tuple(_unfilled(views, answer, expected, fills, lost)),
        misshapen=tuple(misshapen),
        by_design=tuple(
            Finding(kind="passed over", tensor=name, counts={"why": expected.by_design[name]})
            for name in views
            if name in passed_over
        ),
    )


def _is_unread(each: Finding) -> bool:
    return each.kind == "unknown" or (each.kind == "read in part" and not each.counts["read"])


def fills_of(ranks: Iterable[EngineRank]) -> dict[str, set[str]]:
    """Return which names the loaders read into which parameters, or would if they had another shape."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, into in (each for rank in ranks for each in rank.coverage.aimed.items()):
        found[without_numbers(into)].add(without_numbers(name))
    for copy in (copy for each in ranks for copies in each.coverage.copies for copy in copies):
        found[without_numbers(copy.into)].add(without_numbers(copy.source.name))
    return found


def _unfilled(
    sent: Mapping[str, TensorView], answer: EngineAnswer, expected: Expected, fills: Fills, lost: Collection[str]
) -> Iterator[Finding]:
    """Yield the names that would fill an unfilled parameter, or the parameter itself where none is known.

    lost: names that do not arrive, which tell by themselves what they leave unfilled, or of which no shape is known.
    """
    of_pattern: dict[str, list[str]] = defaultdict(list)
    for name in expected.tensors or sent:
        of_pattern[without_numbers(name)].append(name)
    told: set[str] = set()
    for lacking in answer.of_kinds(*OF_PARAMETERS):
        parameter, layer = lacking.tensor, layer_of(lacking.tensor)
        layers = [] if layer == NO_LAYER else [layer, *lacking.layers]
        patterns = fills.get(without_numbers(parameter), ())
        names = [name for pattern, members in of_pattern.items() if pattern in patterns for name in members]
        if not expected.tensors:  # those of other layers tell what this one lacks
            of_one = dict.fromkeys(at_layer(name, 0) for name in names)
            names = [at_layer(name, layer) for name in of_one for layer in layers] or names
        names = [name for name in names if _is_of(name, parameter, layers)]
        due = [name for name in names if name not in sent]
        for name in (each for each in due if each not in told):
            view = expected.tensors.get(name)
            counts = {"form": f"{_form(view)}, " if view else "", "into": parameter}
            yield Finding(kind="unsent", tensor=name, counts=counts)
        if not due and parameter not in told and not any(name in lost for name in names):
            yield lacking
        told |= {*due, parameter}


def _is_of(name: str, parameter: str, layers: Collection[int]) -> bool:
    """Return whether a name has the numbers of a parameter, or of one that it tells of."""
    own, numbers = numbers_in(parameter), numbers_in(name)
    if layers and own and numbers:
        return numbers[0] in layers and numbers[1 : len(own)] == own[1:]
    return numbers[: len(own)] == own


def _form(view: TensorView) -> str:
    return f"{dtype_name(view.dtype)} {list(view.shape)}"


def _misshapen(sent: TensorView, expected: TensorView | None, about: str) -> Finding:
    """Return how a tensor differs from what transformers' class has, or else what the loaders say of it."""
    if expected is None or sent.shape == expected.shape:
        return Finding(kind="misshapen", tensor=sent.name, counts={"sent": _form(sent), "why": about})
    relation = _relation(sent.shape, expected.shape)
    counts = {"sent": _form(sent), "expected": _form(expected), "relation": relation}
    return Finding(kind="other form", tensor=sent.name, counts=counts)


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
