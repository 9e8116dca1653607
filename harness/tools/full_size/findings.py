"""What the ranks of one engine say together: which tensors do not arrive, and what cannot be told."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.config.engine_rules import OF_MANY_RANKS
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.absent_hardware import tells_what_is_absent
from harness.tools.full_size.ranks_at_true_size import (
    EngineRank,
    EngineShape,
    RankFailed,
    examine,
    filled_in_part,
    given_to_all,
    layer_of,
)
from harness.weights.fusing import FusingGroup
from harness.weights.presync_checks import coverage_problems, least_unfilled, unfilled_parameters
from harness.weights.traced.coverage import LoadCoverage

KV_CACHE_SCALES = (".k_scale", ".v_scale")
"""Parameters that a quantized attention has for a KV cache in float8. Without them SGLang takes 1.0."""
OF_ALL_FUSED = ".g_idx"
"""End of a parameter of GPTQ that a fused layer has once: q_proj, k_proj and v_proj each fill the whole of it."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found out about one model of an engine."""

    problems: tuple[str, ...]
    """One sentence for each tensor that does not arrive whole and unchanged."""
    padding: tuple[str, ...]
    """Sentences on what every layer leaves unfilled alike, as padding is."""
    untold: tuple[str, ...]
    """Names whose way into the engine cannot be followed."""
    kv_cache_scales: bool
    """Scales of the attention's KV cache are not filled, as published checkpoints lack them."""
    widened: tuple[str, ...] = ()
    """Names that are sent in fewer bits than the engine holds, each with both dtypes."""
    unread: frozenset[str] = frozenset()
    """Names of which no rank's loader copies anything. Here and below a layer may stand for others that are like it."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Name, or names joined by commas -> what the loader raised."""
    misfits: tuple[str, ...] = ()
    """Those of the problems that are of a name which is read, but does not arrive whole and unchanged."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """The engine's parameters that nothing fills whole, on one rank at least -> what is said of them."""

    partly_filled: frozenset[str] = frozenset()
    """Those of them that every rank fills in part."""

    def excusing(self, parameters: Collection[str]) -> "Findings":
        """Return the same, but for these of the engine's parameters: what they lack is padding."""
        return replace(
            self,
            problems=tuple(each for each in self.problems if subject(each) not in parameters),
            padding=(*self.padding, *(f"{name}: {self.lacking[name]}" for name in parameters)),
            lacking={name: said for name, said in self.lacking.items() if name not in parameters},
            partly_filled=self.partly_filled - set(parameters),
        )

    @classmethod
    def of(
        cls,
        ranks: Sequence[EngineRank],
        passed_over: Collection[str] = (),
        target: Sequence[EngineRank] = (),
        buffers: Collection[str] = (),
    ) -> "Findings":
        """Return what these ranks did. passed_over: names that this model ignores by design; only an error counts.

        target: the ranks of the target model, if these are of its draft model. buffers: the trainer's. Raise
        UnsupportedEnvironment if the loader refuses every name because it needs a GPU.
        """
        given, coverage = given_to_all(ranks)
        coverage = [
            replace(each, overwritten={k: v for k, v in each.overwritten.items() if not k.endswith(OF_ALL_FUSED)})
            for each in coverage
        ]
        scales = {name for each in coverage for name in each.missing if name.endswith(KV_CACHE_SCALES)}
        unfilled = {name for each in coverage for name in scales if each.missing.get(name, (0, 0))[0]}
        refused = {name: error for each in coverage for name, error in each.errors.items()}
        sent = {view.name for group in given for view in group.views}
        if refused and sent <= refused.keys() and all(map(tells_what_is_absent, refused.values())):
            raise UnsupportedEnvironment(
                f"SGLang's loader of this model needs what is absent here: {next(iter(refused.values()))}"
            )
        in_part, padding = filled_in_part(ranks, target)
        untold = {name for each in ranks for name in each.coverage.opaque}
        read = {copy.source.name for each in coverage for copies in each.copies for copy in copies}
        unread = sent - read - untold - {name for names in refused for name in names.split(", ")}
        # A parameter of the engine may have the same name as a tensor that is sent.
        of_engine = unfilled_parameters(coverage)
        left_out = set(passed_over) - refused.keys()
        of_names = [
            each
            for each in coverage_problems(given, coverage, buffers)
            if each not in of_engine and subject(each) not in left_out
        ]
        found = [*(each for each in of_engine if subject(each) not in unfilled), *of_names]
        like = _layers_like(ranks)
        return cls(
            problems=tuple(f"{each}{like.get(layer_of(subject(each)), '')}" for each in (*found, *in_part)),
            padding=tuple(padding),
            untold=tuple(sorted(untold)),
            kv_cache_scales=bool(unfilled),
            widened=tuple(dict.fromkeys(_widened(coverage))),
            unread=frozenset(unread),
            refused=refused,
            misfits=tuple(each for each in of_names if subject(each) not in unread | refused.keys()),
            lacking={
                subject(each): each.partition(": ")[2]
                for each in (*of_engine, *in_part)
                if subject(each) not in unfilled
            },
            partly_filled=frozenset(
                name for name, (missing, of) in least_unfilled(coverage).items() if 0 < missing < of
            ),
        )


def _layers_like(ranks: Sequence[EngineRank]) -> dict[int, str]:
    """Return for each layer that stands for others how many these are, as the end of a sentence."""
    counts = {layer: count for each in ranks for layer, count in each.alike.items()}
    return {layer: f"; and {count} layer{'s' * (count > 1)} like it" for layer, count in counts.items()}


def _widened(coverage: Sequence[LoadCoverage]) -> Iterator[str]:
    for copy in (copy for each in coverage for copies in each.copies for copy in copies):
        sent = copy.source.dtype
        if sent.is_floating_point and copy.held.is_floating_point and 1 < sent.itemsize < copy.held.itemsize:
            yield f"{copy.source.name} ({sent} into {copy.held})".replace("torch.", "")


def subject(sentence: str) -> str:
    """Return the tensor that a sentence begins with."""
    return sentence.partition(":")[0]


def examine_names(
    shape: EngineShape,
    groups: Iterable[FusingGroup],
    *,
    every_name: bool = False,
    passed_over: Collection[str] = (),
    target: Sequence[EngineRank] = (),
    buffers: Collection[str] = (),
) -> tuple[list[EngineRank], Findings]:
    """Build the ranks of an engine, give these names to their loaders, and return the ranks and what they say together.

    every_name: give every name to every rank. The others are those of Findings.of. Raise RankFailed,
    UnsupportedEnvironment.
    """
    groups = tuple(groups)
    ranks = examine(shape, groups, every_name)
    findings = Findings.of(ranks, passed_over, target, buffers)
    return ranks, findings.excusing(_padded(shape, groups, findings.partly_filled))


def _padded(shape: EngineShape, groups: Sequence[FusingGroup], parameters: Collection[str]) -> list[str]:
    """Return those of the parameters that the same names fill whole in an engine of one rank.

    What the ranks of a larger one lack is padding then, such as that of gpt-oss's experts at tp 2, where each rank's
    part is rounded up.
    """
    if not parameters or shape.tp == 1:
        return []
    arguments = {name: value for name, value in shape.arguments.items() if name not in OF_MANY_RANKS}
    one = replace(shape, arguments={**arguments, "tp_size": 1, "pp_size": 1}, tp=1, pp=1)
    try:
        (alone,) = examine(one, groups, every_name=False)
    except RankFailed:  # then nothing is known about padding
        return []
    return [name for name in sorted(parameters) if alone.coverage.missing.get(name, (1, 1))[0] == 0]
