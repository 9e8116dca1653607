"""Compare 64-bit fingerprints of every element that the engine holds with the trainer's, without moving any.

Each scheduler sums up what it holds, and each trainer rank its shards (traced/model_state.py says how). That costs one
read of the weights and names the tensors that differ. readback.py, which moves every element, says in how many
elements.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.rollout.served_models import DRAFT
from harness.trainer.rows import RowShards, own_rows
from harness.weights.loader import EngineLoader
from harness.weights.presync_checks import unfilled_parameters
from harness.weights.sync import WeightSync
from harness.weights.tensor_view import loses_precision
from harness.weights.traced.model_state import WRAP, Powers, weighted_sum
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.worker.kept_trace import PADDING

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
        for (name, _, _), sums in _sums_by_box(boxes, received).items():
            total += min(sums)
            wrong += [name] * (len(sums) > 1)  # ranks that should hold the same elements differ
        wrong += names[tensor] if total % WRAP != expected[tensor] else []
    wrong = [in_role(name, of_draft) for name in wrong]
    wrong += _wrong_padding(loader, received)
    # A parameter may get memory of its own after the first sync, such as a tied head or that of a draft. Nothing fills
    # it then.
    wrong += [each for each in unfilled_parameters(loader.coverage) if each not in loader.unfilled_at_first]
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


def sent_sums(weights: TrainerWeights) -> dict[str, int]:
    """Return the fingerprint of each tensor of a sync, in the dtype in which it is sent.

    A collective call of all ranks.
    """
    return tensor_sums(_as_sent(weights))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSums:
    """Fingerprints of the trainer's tensors; the same on every rank."""

    sent: Mapping[str, int]
    """Of what a sync sends, in the dtype in which it is sent."""
    held: Mapping[str, int]
    """Of the model's own tensors, read at the model and not at the sender, in the dtype in which the model computes."""

    sent_otherwise: tuple[str, ...] = ()
    """Names of tensors that are sent with other values than the model holds, though nothing is to convert them."""


def trainer_sums(sync: WeightSync) -> TrainerSums:
    """Return the fingerprints of what was sent last, and of the model as it is now. A collective call of all ranks."""
    sent, held = _as_sent(sync.weights), as_computed(sync.sent.held_tensors(), sync.sent.dtype)
    # Almost always they are the same tensors: then each is summed up once.
    own = {name: each for name, each in held.items() if name not in sent or not _is_same(each, sent[name])}
    sums = tensor_sums({f"sent/{name}": each for name, each in sent.items()} | own)
    of_sent = {name: sums[f"sent/{name}"] for name in sent}
    unconverted = [name for name in own if name in sent and own[name][1] == sent[name][1]]
    return TrainerSums(
        sent=of_sent,
        held={name: sums[name] if name in own else of_sent[name] for name in held},
        sent_otherwise=tuple(
            name for name in unconverted if sync.weights.converter.renames_only and sums[name] != of_sent[name]
        ),
    )


def as_computed(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """Return tensors of a model, each with the dtype in which it is computed with: parameters in `dtype`, buffers as
    they are.
    """
    return {
        name: (each, dtype if dtype and isinstance(each, nn.Parameter) and each.is_floating_point() else each.dtype)
        for name, each in tensors.items()
    }


def _as_sent(weights: TrainerWeights) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    dtypes = {view.of: view.dtype for view in weights.layout}
    return {name: (tensor, dtypes[name]) for name, tensor in weights.tensors.items()}


def _is_same(one: tuple[torch.Tensor, torch.dtype], other: tuple[torch.Tensor, torch.dtype]) -> bool:
    return one[0] is other[0] and one[1] == other[1]


@torch.no_grad()
def tensor_sums(tensors: Mapping[str, tuple[torch.Tensor, torch.dtype]]) -> dict[str, int]:
    """Return the fingerprint of each of the trainer's tensors in this dtype, added up over all ranks' shards.

    Collective.
    """
    powers = Powers()
    sums = [_sum_of_shard(tensor, dtype, powers) for tensor, dtype in tensors.values()]
    everyone = all_gather(torch.stack(sums).tolist() if sums else [])
    return {name: sum(parts) % WRAP for name, *parts in zip(tensors, *everyone, strict=True)}


def _sum_of_shard(tensor: torch.Tensor, dtype: torch.dtype, powers: Powers) -> torch.Tensor:
    """Sum up this rank's rows of a tensor. A tensor that is not sharded counts on rank 0 alone."""
    first = own_rows(tensor).start * RowShards.of(tensor).row_elements
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    elif dist.get_rank() != 0:
        tensor = tensor.reshape(-1)[:0]
    return weighted_sum(tensor.detach().to(dtype).reshape(-1), (1,), first, powers)


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


def _sums_by_box(boxes: dict[Box, list[tuple[int, str]]], received: dict[int, dict[str, int]]) -> dict[Box, set[int]]:
    return {box: {received[rank][part] for rank, part in copies} for box, copies in boxes.items()}
