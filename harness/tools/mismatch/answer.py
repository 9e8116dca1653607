"""The answer: which source makes engine and trainer differ, in one sentence, as a table and as JSON."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.config.precision import Dtype
from harness.tools.mismatch.operators import Compared
from harness.weights.log_probs import FLOOR, LARGEST_BASELINE, LogProbDifference

MOST = 0.5
"""A source that removes at least this share of the difference is named as its source."""
NEAR = 0.75
"""A broad change, such as float32 everywhere, includes narrow ones. A narrow one is named in its place if it removes at
least this part of what the broad one removes."""
IN_DECODING = ", in decoding"
"""What is added to a change that was measured on what the engine reports while it generates."""
ALIKE, FAR = 1.5, 5.0
"""If the engine is at most ALIKE times as far from float32 as the trainer, the two count as equally exact. If it is FAR
times as far or more, it computes something else."""
HEAD = "head"
"""What comes after the last module whose output is compared: the head, and the log-probs of its logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One setting: how far engine and trainer are apart with it, and without it, on the same weights and tokens."""

    name: str
    how: str
    """From what to what."""
    before: LogProbDifference | None = None
    after: LogProbDifference | None = None
    breadth: int = 0
    """Above that of the changes which it includes: one rank has no expert parallelism either."""
    why_not: str = ""
    """Why it could not be changed, or not be measured, if so."""

    @property
    def removed(self) -> float:
        """How much smaller the mean difference is without this source; 0 if it grew, or if nothing was measured."""
        return max(0.0, self.before.mean - self.after.mean) if self.before and self.after else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How far engine and trainer, in half precision, are from a trainer that computes the same tokens in float32."""

    engine: float
    """The mean difference of the engine's log-probs, in decoding or in that way of prefill where it is largest."""
    trainer: float
    """That of the run's own trainer."""
    engine_bulk: float
    trainer_bulk: float
    """The same two, without the quarter of the tokens that are furthest away."""

    @property
    def explains(self) -> bool:
        """Whether the engine is about as exact as the trainer."""
        return self.engine <= ALIKE * self.trainer

    @property
    def explains_bulk(self) -> bool:
        """Whether it is so for most tokens. A few others move far when rounding makes a router choose other experts."""
        return self.engine_bulk <= ALIKE * self.trainer_bulk

    @property
    def is_exceeded(self) -> bool:
        """Whether the engine is so far away that rounding cannot be why."""
        return self.engine >= FAR * self.trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was measured, and what follows."""

    dtype: Dtype
    difference: LogProbDifference
    """Of the log-probs that the engine reported while it generated, and the trainer's."""
    prefill: LogProbDifference
    """The same tokens scored by the engine at once."""
    sources: Sequence[Source]
    first: Compared | None
    """The first output that differs, though those before it do not."""
    compared: Sequence[Compared] = field(default_factory=tuple)
    where: str = ""
    """In which engine the outputs were compared, if not in the run's own."""
    fields: Sequence[str] = ()
    """Fields of the model's config that differ."""
    flips: float | None = None
    """Share of (token, router) pairs that go to other experts; None without routers."""
    rounding: Rounding | None = None
    """None if the run computes in float32, or if no float32 trainer was built."""
    varies: Mapping[str, float] = field(default_factory=dict)
    """By side, engine and trainer, the mean difference between two of its passes over the same tokens."""

    @property
    def agrees(self) -> bool:
        """Whether engine and trainer are as close as rounding lets them be."""
        return self.is_small or self.is_rounding

    @property
    def is_small(self) -> bool:
        return self.total <= FLOOR[self.dtype]

    @property
    def is_rounding(self) -> bool:
        """Whether nothing is found that would explain the difference, and rounding does."""
        is_found = self.first or self.largest_share >= MOST or self.total > LARGEST_BASELINE[self.dtype]
        if is_found or self.rounding is None:
            return False
        return self.rounding.explains or (bool(self.flips) and self.rounding.explains_bulk)

    @property
    def total(self) -> float:
        """The mean difference that is to be explained: the largest of those with every source in place."""
        measured = [each.before.mean for each in self.sources if each.before]
        return max(self.difference.mean, self.prefill.mean, *measured)

    def share(self, source: Source) -> float:
        """Return the share of the mean difference that is gone without this source.

        Of an infinite one it is all or nothing.
        """
        if math.isinf(self.total):  # a log-prob is no number, or infinite
            return float(bool(source.before and source.after) and source.removed == math.inf)
        return source.removed / self.total if self.total else 0.0

    @property
    def largest(self) -> Source | None:
        """The setting without which most is gone, or a narrower one without which almost as much is; None if none was
        changed.
        """
        measured = [each for each in self.sources if each.after]
        most = max(map(self.share, measured), default=0.0)
        near = [each for each in measured if self.share(each) >= NEAR * most]
        return max(near, key=lambda each: (-each.breadth, self.share(each)), default=None)

    @property
    def largest_share(self) -> float:
        return self.share(self.largest) if self.largest else 0.0

    @property
    def is_setting(self) -> bool:
        """Whether the source is a setting that was changed."""
        return not self.agrees and self.largest_share >= MOST

    @property
    def source(self) -> str:
        """The name of the largest source: a setting, else the first output that differs, else ""."""
        if self.agrees:
            return ""
        if self.largest and self.is_setting:
            return self.largest.name
        if self.first:
            return self.first.module
        return HEAD if self._is_head else ""

    @property
    def _is_head(self) -> bool:
        if not self.compared or self.prefill.mean <= FLOOR[self.dtype]:
            return False
        # In half precision modules that agree may still round enough to explain it, and not all may have been compared.
        is_beyond_rounding = self.rounding is not None and self.rounding.is_exceeded
        return self.dtype == "float32" or (is_beyond_rounding and any(each.name == "norm" for each in self.compared))

    def sentence(self) -> str:
        """Return the answer in one sentence."""
        size = f"the mean difference of the log-probs, {self.total:.1e}"
        if self.is_small:
            return f"engine and trainer agree: {size}, is rounding ({FLOOR[self.dtype]:.1e} or less in {self.dtype})"
        if self.is_rounding and self.rounding:
            rounding, but, most = self.rounding, "", ""
            theirs, own = rounding.engine, rounding.trainer
            if not rounding.explains:
                but, most = " but for tokens that took other experts", "for three quarters of the tokens "
                theirs, own = rounding.engine_bulk, rounding.trainer_bulk
            exact = f"from a trainer in float32 {most}the engine is {theirs:.1e}, the trainer in {self.dtype} {own:.1e}"
            return f"engine and trainer agree{but}: {size}, is rounding: {exact}"
        largest, share, hint = self.largest, self.largest_share, self._hint()
        if largest and self.is_setting:
            change = f"{largest.name} ({largest.how})"
            return f"SOURCE: {change}: with this change {share:.0%} of {size}, is gone{self._left(largest)}{self._where()}{hint}"
        rest = f"no setting removes more than {share:.0%}"
        seen = f", seen in {self.where}" if self.where else ""
        if self.first:
            return (
                f"SOURCE: {self.first.module}: {self.first.name} differs by {self.first.error:.1e} for {self.first.tokens:.0%} of the"
                f" tokens, and all that was compared before it agrees to {self.first.before:.0e}{seen}; {rest} of {size}{hint}"
            )
        if self.source == HEAD:
            agree = f"all {len(self.compared)} outputs of modules up to the last norm agree"
            return f"SOURCE: {HEAD}, or how log-probs are made of its logits: {agree}, and {rest} of {size}{hint}"
        show = "show nothing" if self.compared else "could not be compared"
        return f"SOURCE: unknown: {rest} of {size}, and the outputs of modules {show}{hint}"

    def _left(self, source: Source) -> str:
        """Return what is left without a source, if that is more than rounding: there is another one then."""
        left = source.after.mean if source.after else 0.0
        return f", and {left:.1e} is left" if left > FLOOR[self.dtype] else ""

    def _where(self) -> str:
        seen = f", seen in {self.where}" if self.where else ""
        return f"; the first module that differs is {self.first.module}{seen}" if self.first else ""

    def _hint(self) -> str:
        fields = [f"; the model's config differs: {'; '.join(self.fields[:3])}"] if self.fields else []
        twice = [
            f"; the {side}'s own log-probs differ by {apart:.1e} from one pass to the next"
            for side, apart in self.varies.items()
            if apart > FLOOR[self.dtype]
        ]
        return "".join([*twice, *fields])

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["sources"] = [asdict(each) | {"share": self.share(each)} for each in self.sources]
        return _as_json(found | {"agrees": self.agrees, "source": self.source, "sentence": self.sentence()})

    def table(self) -> str:
        """Return the table of the sources for the console, the largest first."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("source", "changed", "mean", "without", "p99", "largest", "k3", "share"):
            table.add_column(name, justify="left" if name in ("source", "changed") else "right", overflow="fold")
        for each in sorted(self.sources, key=lambda each: -each.removed):
            if each.before and each.after:
                after = each.after
                numbers = (each.before.mean, after.mean, after.percentile_99, after.largest, after.k3)
                table.add_row(each.name, each.how, *(f"{number:.1e}" for number in numbers), f"{self.share(each):.0%}")
            else:
                table.add_row(each.name, f"{each.how}: {each.why_not}", *[""] * 6)
        text = io.StringIO()
        Console(width=150, color_system=None, file=text).print(table)
        return text.getvalue().rstrip()


def _as_json(value: Any) -> Any:
    """Return a value without the floats that JSON does not have: their names, such as "inf", stand for them."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
