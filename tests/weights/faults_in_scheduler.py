"""Run inside SGLang's schedulers, as custom weight loaders: break the scheduler's end of a pull.

Each takes its text as the name of the only tensor. An empty text repairs what it broke.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from harness.weights.pull.copies import CpuCopies
from harness.weights.pull.puller import Puller
from harness.weights.traced.loader_trace import GroupTrace
from harness.weights.traced.model_state import model_tensors

LINGER = f"{__name__}.linger"
SKIP = f"{__name__}.skip"
SPOIL = f"{__name__}.spoil"
REPLAN = f"{__name__}.replan"
KEEP = f"{__name__}.keep"
HIDE = f"{__name__}.hide"

Named = Sequence[tuple[str, torch.Tensor]]

_run, _pull, _make_copies = CpuCopies.run, Puller.pull, Puller.make_copies


def linger(model: Any, named_tensors: Named) -> None:
    """SECONDS: a pull waits this long in the middle of its copies."""
    text = named_tensors[0][0]

    def run_in_halves(copies: CpuCopies) -> None:
        everything, middle = copies.pairs, len(copies.pairs) // 2
        copies.pairs = everything[:middle]
        _run(copies)
        time.sleep(float(text))
        copies.pairs = everything[middle:]
        _run(copies)
        copies.pairs = everything

    CpuCopies.run = run_in_halves if text else _run  # type: ignore[method-assign]


def skip(model: Any, named_tensors: Named) -> None:
    """RANK: this engine rank says that it has pulled, but it copies nothing."""
    text = named_tensors[0][0]

    def pretend(puller: Puller, number: int, index: int) -> None:
        puller.done = number

    Puller.pull = pretend if text == str(dist.get_rank()) else _pull  # type: ignore[method-assign]


def spoil(model: Any, named_tensors: Named) -> None:
    """ "RANK NAME": on this engine rank, flip one bit of the first element of the tensor that the engine calls NAME."""
    rank, name = named_tensors[0][0].split()
    if rank == str(dist.get_rank()):
        held = model_tensors(model)[name]
        held.detach()[(0,) * held.ndim].view(torch.int32).bitwise_xor_(1)


def keep(model: Any, named_tensors: Named) -> None:
    """NAME: this module keeps a copy of its weight, as some routers do."""
    text = named_tensors[0][0]
    for name, module in model.named_modules():
        if text and name == text:
            module.kept_weight = module.weight.detach().double()
        elif not text and hasattr(module, "kept_weight"):
            del module.kept_weight


def hide(model: Any, named_tensors: Named) -> None:
    """NAME: from its first forward pass on, this module computes with a copy of its weight that nothing leads to."""
    module = model.get_submodule(named_tensors[0][0])
    compute, kept = module.forward, list[torch.Tensor]()

    def compute_with_copy(*arguments: Any, **named: Any) -> Any:
        current = module.weight.data
        kept.append(current.clone())
        module.weight.data = kept[0]
        try:
            return compute(*arguments, **named)
        finally:
            module.weight.data = current
            del kept[1:]

    module.forward = compute_with_copy


def replan(model: Any, named_tensors: Named) -> None:
    """ "shift NAME": its rows are read one row too far. "swap A B": names that begin with A are read where B's lie."""
    words = named_tensors[0][0].split()

    def make_wrong_copies(puller: Puller) -> None:
        right = puller.trace.traces
        puller.trace.traces = [
            _shifted(each, words[1]) if words[0] == "shift" else _swapped(each, *words[1:]) for each in right
        ]
        try:
            _make_copies(puller)
        finally:
            puller.trace.traces = right

    Puller.make_copies = make_wrong_copies if words else _make_copies  # type: ignore[method-assign]


def _shifted(traced: GroupTrace, name: str) -> GroupTrace:
    copies = []
    for copy in traced.copies:
        source = copy.source
        if source.name == name:
            rows = (source.shape[0] - 1, *source.shape[1:])
            source = replace(source, offset=source.offset + source.stride[0], shape=rows)
        copies.append(replace(copy, source=source))
    return replace(traced, copies=copies)


def _swapped(traced: GroupTrace, one: str, other: str) -> GroupTrace:
    sources = {copy.source.name: copy.source for copy in traced.copies}
    swapped = {name: name.replace(one, other) if name.startswith(one) else name.replace(other, one) for name in sources}
    return replace(traced, copies=[replace(each, source=sources[swapped[each.source.name]]) for each in traced.copies])
