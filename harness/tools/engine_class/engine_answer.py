"""What the ranks of one engine say together: which tensors do not arrive, and what cannot be told."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.config.engine_rules import OF_MANY_RANKS
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.absent_hardware import tells_what_is_absent
from harness.tools.engine_class.traced_ranks import EngineRank, EngineShape, RankFailed, examine, given_to_all
from harness.weights.findings import Finding
from harness.weights.fusing import FusingGroup
from harness.weights.layer_names import layer_of, without_layer
from harness.weights.presync_checks import UNFILLED, coverage_problems
from harness.weights.traced.coverage import LoadCoverage

KV_CACHE_SCALES = (".k_scale", ".v_scale")
"""Parameters that a quantized attention has for a KV cache in float8. Without them SGLang takes 1.0."""
OF_ALL_FUSED = ".g_idx"
"""End of a parameter of GPTQ that a fused layer has once: q_proj, k_proj and v_proj each fill the whole of it."""
OF_PARAMETERS = (*UNFILLED, "lacking", "expert lost")
"""Kinds of findings on a parameter that nothing fills whole, on one rank at least."""


@dataclass(frozen=True, kw_only=True)
class EngineAnswer:
    """What was found out about one model of an engine."""

    ranks: tuple[EngineRank, ...]
    findings: tuple[Finding, ...]
    """One for each tensor that does not arrive whole and unchanged. Its layers are those for which the same is true."""
    passed_over: tuple[Finding, ...] = ()
    """Names that this model ignores by design."""
    padding: tuple[Finding, ...] = ()
    """Elements that every layer leaves unfilled in the same way: padding."""
    untold: tuple[str, ...] = ()
    """Names whose way into the engine cannot be followed."""
    kv_cache_scales: bool = False
    """Scales of the attention's KV cache are not filled, as published checkpoints lack them."""
    widened: tuple[str, ...] = ()
    """Names that are sent in fewer bits than the engine holds, each with both dtypes."""

    @classmethod
    def of(
        cls,
        ranks: Sequence[EngineRank],
        passed_over: Collection[str] = (),
        target: Sequence[EngineRank] = (),
        buffers: Collection[str] = (),
    ) -> "EngineAnswer":
        """Return what these ranks did. passed_over: names that this model ignores by design; only an error counts.

        target: the ranks of the target model, if these are of its draft model. buffers: the trainer's. Raise
        UnsupportedEnvironment if the loader refuses every name because it needs a GPU.
        """
        given, coverage = given_to_all(ranks)
        coverage = [
            replace(each, overwritten={k: v for k, v in each.overwritten.items() if not k.endswith(OF_ALL_FUSED)})
            for each in coverage
        ]
        problems = sorted(coverage_problems(given, coverage, buffers), key=lambda each: each.kind not in UNFILLED)
        _check_hardware(given, [each for each in problems if each.kind == "refused"])
        in_part, padding = filled_in_part(ranks, target)
        alike = {layer: others for each in ranks for layer, others in each.alike.items()}
        findings, left_out, scales = [], [], False
        for each in (*problems, *in_part):
            found = replace(each, layers=alike.get(layer_of(each.tensor), ()))
            if each.kind in UNFILLED and each.tensor.endswith(KV_CACHE_SCALES):
                scales = True
            elif each.tensor in passed_over and each.kind not in ("refused", *OF_PARAMETERS):
                left_out.append(found)
            else:
                findings.append(found)
        return cls(
            ranks=tuple(ranks),
            findings=tuple(findings),
            passed_over=tuple(left_out),
            padding=tuple(padding),
            untold=tuple(sorted({name for each in ranks for name in each.coverage.opaque})),
            kv_cache_scales=scales,
            widened=tuple(dict.fromkeys(_widened(coverage))),
        )

    def of_kinds(self, *kinds: str) -> list[Finding]:
        """Return the findings of these kinds."""
        return [each for each in self.findings if each.kind in kinds]

    def excusing(self, parameters: Collection[str]) -> "EngineAnswer":
        """Return the same, but for these of the engine's parameters: what they lack is padding."""
        excused = tuple(each for each in self.of_kinds(*OF_PARAMETERS) if each.tensor in parameters)
        findings = tuple(each for each in self.findings if each not in excused)
        return replace(self, findings=findings, padding=(*self.padding, *excused))


def _check_hardware(given: Sequence[FusingGroup], refusals: Sequence[Finding]) -> None:
    """Raise UnsupportedEnvironment if the loader refuses every name because it needs a GPU."""
    sent = {view.name for group in given for view in group.views}
    errors = [each.counts["error"] for each in refusals]
    if errors and sent <= {name for each in refusals for name in each.every} and all(map(tells_what_is_absent, errors)):
        raise UnsupportedEnvironment(f"SGLang's loader of this model needs what is absent here: {errors[0]}")


def filled_in_part(
    ranks: Sequence[EngineRank], target: Sequence[EngineRank] = ()
) -> tuple[list[Finding], list[Finding]]:
    """Return findings on parameters that some ranks' loaders fill whole, and others do not: problems, and what looks
    like padding.

    Where sizes do not divide, the last ranks hold padding, in every layer alike. Under expert parallelism each rank
    holds other experts, so one that is lost leaves a part of one rank unfilled. A whole expert is no padding. target:
    the same ranks of the target model, if these are of its draft model, whose one layer has to be compared with the
    target's.
    """
    problems: list[Finding] = []
    padding: list[Finding] = []
    key_of = _last_names if target else without_layer
    filled = {name for each in ranks for name, (missing, _) in each.coverage.missing.items() if not missing}
    compared = {each.rank: each for each in target or ranks}
    # If sizes do not divide, the last of the ranks that share experts may hold padding alone, but never the first.
    first = [each for each in ranks if each.moe_tp_rank == 0]
    lost = {(each.moe_ep_rank, name): count for each in first for name, count in each.untouched_experts.items()}
    for each in ranks:
        least: dict[str, int] = {}
        for name, (missing, _) in compared[each.rank].coverage.missing.items():
            least[key_of(name)] = min(missing, least.get(key_of(name), missing))
        for name, (missing, elements) in each.coverage.missing.items():
            if missing and name in filled:
                experts = lost.get((each.moe_ep_rank, name), 0)
                counts = {"missing": missing, "elements": elements, "experts": experts}
                kind = "expert lost" if experts else "lacking"
                is_problem = experts or missing > least.get(key_of(name), 0)
                found = Finding(kind=kind, tensor=name, ranks=(each.rank,), counts=counts)
                (problems if is_problem else padding).append(found)
    return problems, padding


def _last_names(name: str) -> str:
    """Return what a parameter of a layer of the target and of the draft model have in common."""
    return ".".join(name.split(".")[-2:])


def _widened(coverage: Sequence[LoadCoverage]) -> Iterator[str]:
    for copy in (copy for each in coverage for copies in each.copies for copy in copies):
        sent = copy.source.dtype
        if sent.is_floating_point and copy.held.is_floating_point and 1 < sent.itemsize < copy.held.itemsize:
            yield f"{copy.source.name} ({sent} into {copy.held})".replace("torch.", "")


def ask_engine(
    shape: EngineShape,
    groups: Iterable[FusingGroup],
    *,
    every_name: bool = False,
    passed_over: Collection[str] = (),
    target: Sequence[EngineRank] = (),
    buffers: Collection[str] = (),
) -> EngineAnswer:
    """Build the ranks of an engine, give these names to their loaders, and return what they say together.

    every_name: give every name to every rank. The others are those of EngineAnswer.of. Raise RankFailed,
    UnsupportedEnvironment.
    """
    groups = tuple(groups)
    answer = EngineAnswer.of(examine(shape, groups, every_name), passed_over, target, buffers)
    return answer.excusing(_padded(shape, groups, {each.tensor for each in answer.of_kinds("filled in part")}))


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
    return [name for name in parameters if alone.coverage.missing.get(name, (1, 1))[0] == 0]
