"""Compare what the schedulers of an engine hold with what they should, where it is: no tensor is moved.

By 64-bit fingerprints of every element that a copy of the traced loader filled; and, for what no copy shows, by loading
it again. That costs one read of the weights and names the tensors that differ.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from harness.cluster.world import all_gather
from harness.rollout.served_models import DRAFT, TARGET
from harness.weights.loader import EngineLoader
from harness.weights.presync_checks import unfilled_parameters
from harness.weights.tensor_view import TensorView, loses_precision
from harness.weights.traced.model_state import DERIVED, WRAP
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.verification.trainer_sums import sent_sums
from harness.weights.worker import load_again as worker
from harness.weights.worker.kept_trace import PADDING, OwnLoad, fingerprint_everything
from harness.weights.worker.load_again import Reload, Reloaded

Box = tuple[str, int, tuple[tuple[int, int], ...]]
"""What a copy reads: checkpoint name, offset and steps; equal for ranks that hold the same elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintComparison:
    """The outcome of one comparison; the same on every rank."""

    tensors: int
    """Checkpoint tensors that were sent."""
    left: tuple[str, ...]
    """Names of the trainer's tensors that could not be compared: they arrive in ways that cannot be followed, or are
    rounded."""
    compared: int
    """Checkpoint tensors of the others."""
    wrong: tuple[str, ...]
    """Checkpoint tensors that the engine does not hold as the trainer does, those of its draft model as "draft: NAME".
    All experts of one tensor are named together. Also engine tensors with nonzero padding."""


def compare_fingerprints(
    weights: TrainerWeights, loader: EngineLoader, expected: Mapping[str, int] | None = None
) -> FingerprintComparison:
    """Compare what the engine holds with the trainer's weights, after a sync. A collective call of all ranks.

    expected: the sums of what was sent; None computes them. Raise RuntimeError if the schedulers cannot report what
    they hold.
    """
    expected, received = expected or sent_sums(weights), loader.fingerprints()
    names: dict[str, list[str]] = defaultdict(list)
    elements: dict[str, int] = defaultdict(int)
    for view in weights.layout:
        names[view.of].append(view.name)
        elements[view.of] += view.numel
    compared, wrong, of_draft = set(), list[str](), loader.of_draft
    for tensor, boxes in _followed(loader).items():
        if sum(prod(size for _, size in steps) for _, _, steps in boxes) != elements[tensor]:
            continue  # some elements are read twice in boxes that are not equal, so the sums would not add up
        compared.add(tensor)
        total = 0
        for (name, _, _), copies in boxes.items():
            sums = {received[rank][part] for rank, part in copies}
            total += min(sums)
            wrong += [name] * (len(sums) > 1)  # ranks that should hold the same elements differ
        wrong += names[tensor] if total % WRAP != expected[tensor] else []
    wrong = [in_role(name, of_draft) for name in wrong]
    wrong += _wrong_padding(loader, received)
    # A parameter may get memory of its own after the first sync, such as a tied head or that of a draft. Nothing fills
    # it then.
    wrong += [each for each in map(str, unfilled_parameters(loader.coverage)) if each not in loader.unfilled_at_first]
    everyone = all_gather((wrong, [name for name in names if name not in compared]))
    left = dict.fromkeys(name for _, each in everyone for name in each)
    return FingerprintComparison(
        tensors=len(weights.layout),
        left=tuple(left),
        compared=sum(len(views) for name, views in names.items() if name not in left),
        wrong=tuple(dict.fromkeys(name for each, _ in everyone for name in each)),
    )


def in_role(name: str, of_draft: Collection[str]) -> str:
    """Return a checkpoint tensor's name for a message, with its role if the engine's draft model alone holds it."""
    return f"{DRAFT}: {name}" if name in of_draft else name


def _followed(loader: EngineLoader) -> dict[str, dict[Box, list[tuple[int, str]]]]:
    """Return tensor -> box -> (engine rank, "<group>/<copy>") of the copies that read it.

    Tensors with a name that arrives in a way that cannot be followed, or that the engine rounds, are left out.
    """
    lost = set(loader.opaque)
    found: dict[str, dict[Box, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for each in loader.coverage:
        for number, copies in enumerate(each.copies):
            for part, copy in enumerate(copies):
                source = copy.source
                found[source.of][source.name, source.offset, source.steps].append((each.rank, f"{number}/{part}"))
                if loses_precision(source.dtype, copy.held):
                    lost.add(source.name)
    lost_tensors = {view.of for group in loader.groups for view in group.views if view.name in lost}
    return {tensor: boxes for tensor, boxes in found.items() if tensor not in lost_tensors}


def _wrong_padding(loader: EngineLoader, received: dict[int, dict[str, int]]) -> list[str]:
    """Return the engine's tensors that are not zero where their loader makes them zero: padding is computed with
    too.
    """
    return [
        f"the padding of {', '.join(dict.fromkeys(names))}"
        for each in loader.coverage
        for number, names in each.padded.items()
        if received[each.rank][f"{number}/{PADDING}"]
    ]


# What no copy shows


@dataclass(kw_only=True, slots=True)
class ReloadFindings:
    """What loading again showed; the same on every rank."""

    wrong: list[str] = field(default_factory=list)
    """One sentence for each of the engine's tensors that is not what its loader makes of the trainer's tensors."""
    derived: int = 0
    """The engine's tensors, of rank 0's scheduler, that it derives from others and that were compared."""
    not_covered: list[str] = field(default_factory=list)
    """One sentence for each of what could not be compared."""


@torch.no_grad()
def load_again(weights: TrainerWeights, loader: EngineLoader, names: Collection[str]) -> ReloadFindings:
    """Load the trainer's tensors of these names again, and what the loader computes with or derives, and compare.

    A right load, done once more, changes nothing. So each scheduler runs its own loader again, compares what that
    writes with what it held before, and takes it back (traced/undo.py). A collective call of all ranks; the names must
    be the same on each. It needs an engine that can be asked. For a model whose loader only copies, and no names, it
    does nothing.
    """
    loader.trace_once()
    together = {name for each in all_gather(sorted(loader.derived_over)) for name in each}
    alone = ({name for each in all_gather(sorted(loader.computing)) for name in each} | set(names)) - together
    findings, derives = ReloadFindings(), any(all_gather(loader.derives))
    if not alone and not derives:
        return findings  # an update session would cost the engine a pause
    with loader.engine.weight_update():
        for bucket in weights.buckets_of(alone):
            one = (weights.gather_buffer(bucket), bucket.views)
            _add(findings, loader, [view.name for view in bucket.views], Reload(sent=(one,)))
        if derives:
            buckets = weights.buckets_of(together)
            sent = tuple((weights.gather_buffer(bucket), bucket.views) for bucket in buckets)
            sent_names = [view.name for bucket in buckets for view in bucket.views]
            findings.derived = _add(findings, loader, sent_names, Reload(sent=sent, derive=True))
    return findings


def _add(findings: ReloadFindings, loader: EngineLoader, names: list[str], reload: Reload) -> int:
    """Have all schedulers do one reload; return how many tensors rank 0's compared."""
    everyone: list[Reloaded] = all_gather(loader.engine.ask(worker.load_again, reload))
    what = ", ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])]) or "what is derived"
    errors = dict.fromkeys(each.error for each in everyone if each.error)
    findings.not_covered += [f"{what}: loading again raised {error}" for error in errors]
    if not errors and not any(each.compared for each in everyone):
        findings.not_covered.append(f"{what}: loading again writes nothing that can be seen")
    sent = [view for group in loader.groups for view in group.views]
    places: dict[str, list[str]] = {}
    for rank, each in enumerate(everyone):
        for name, (count, size) in each.differences.items():
            places.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
    findings.wrong += [
        f"{describe_tensor(name, sent, loader)}, which the engine computes as it loads: {', '.join(where[:4])}"
        + " ..." * (len(where) > 4)
        for name, where in places.items()
    ]
    return everyone[0].compared


# What has changed since a moment


def changed_since(before: OwnLoad, loader: EngineLoader) -> list[str]:
    """Return the engine's tensors, of all ranks, that changed since fingerprint_everything was asked, each with its checkpoint
    names.

    A name that was not there before is another name of a tensor, which SGLang makes when it first needs it (DeepSeek's
    attn_mha.kv_b_proj).
    """
    with loader.engine.weight_update():
        now = loader.engine.ask(fingerprint_everything)
    mine = {name for name, held in before.sums.items() if now.sums.get(name, held) != held}
    sent = [view for group in loader.groups for view in group.views]
    everyone = sorted({name for each in all_gather(mine) for name in each})
    return [describe_tensor(name, sent, loader) for name in everyone]


def changed(before: Mapping[int, Mapping[str, int]], now: Mapping[int, Mapping[str, int]]) -> list[str]:
    """Return one sentence for each tensor of an engine whose fingerprint is another one now.

    A collective call of all ranks.

    before, now: engine rank -> fingerprints by name. One that is not there any more is left out: SGLang has replaced
    it.
    """
    ranks: dict[str, list[str]] = {}
    for rank, known in before.items():
        for name, fingerprint in known.items():
            if now[rank].get(name, fingerprint) != fingerprint:
                ranks.setdefault(name, []).append(str(rank))
    everyone = all_gather([f"{name} on engine rank {', '.join(on)}" for name, on in ranks.items()])
    return list(dict.fromkeys(sentence for each in everyone for sentence in each))


def describe_tensor(engine_name: str, sent: Sequence[TensorView], loader: EngineLoader) -> str:
    """Return an engine's name of a tensor with the checkpoint tensors that it is made of: SGLang fuses some."""
    known = [view.name for view in sent]
    parts = dict.fromkeys(part for each in loader.coverage for part in each.filled.get(engine_name, ()))
    engine_name = engine_name.removeprefix(f"{TARGET}.")
    module, _, attribute = engine_name.rpartition(".")  # a derived tensor is derived from a weight of its module
    derived_from = f"{module}.{DERIVED.get(attribute, '')}"
    names = list(parts) or [name for name in known if name.startswith(derived_from)]
    if engine_name in known or not names:
        return engine_name
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return f"{engine_name} ({', '.join([*names[:4], *more])})"
