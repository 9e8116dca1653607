"""Which module is the first whose output differs between engine and trainer, although what it was given does not.

An engine of several ranks holds shares: of a column-parallel layer's output each rank has some columns, of a
row-parallel one each has a summand until they are added up. So an output counts as equal if the ranks' copies, or their
sum, or their columns side by side, are what the trainer has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.tools.mismatch.recording import INPUT, ROUTED, ROUTERS, Outputs

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""SGLang's projection -> those of the checkpoint that it computes at once."""
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative difference of a token's vector above which it counts as another one."""
MANY, SEVERAL = 0.05, 2
"""In half precision a router may choose otherwise. An output counts as another one there if more than this share of the
tokens differ, and more than this many."""
FEWEST = 8
"""Tokens without which nothing can be said of a module in half precision."""
GROWTH = 5.0
"""Errors grow from layer to layer. An output is named if its error is so many times that of all before it."""
OTHER_FUNCTIONS = ("act_fn",)
"""Names that both sides have for different functions: SGLang's act_fn also multiplies."""
NOT_COMPUTED = frozenset(
    ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "auto_map")
)
"""Fields of a model's config that change nothing of what it computes, or that both sides get otherwise."""
SGLANGS_YARN = ["deepseek_yarn", "yarn"]
"""SGLang gives the rope_type of DeepSeek's models another name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One module's output on both sides."""

    name: str
    error: float
    """Largest relative difference of a token's vector; for half precision, the largest of those that may not be
    exceptions."""
    tokens: float
    """Share of the tokens whose vectors differ by more than the tolerance."""
    before: float
    """The largest error of the outputs before it."""
    agreeing: int = 0
    """How many tokens from the first one on agree here and in all outputs before it. A token whose router chose
    otherwise changes, by attention, those that follow it."""

    @property
    def module(self) -> str:
        """The module that makes the difference: the block, if the difference is in what reaches its last projection."""
        return self.name.rpartition(".")[0] if self.name.endswith(INPUT) else self.name

    def is_first_difference(self, dtype: str) -> bool:
        return self.error > max(TOLERANCE[dtype], GROWTH * self.before)


def compare(
    engine: Sequence[Outputs], trainer: Outputs, dtype: str, before: float = 0.0, agreeing: int | None = None
) -> list[Compared]:
    """Return the outputs that both sides have, in the order in which the trainer computed them.

    In half precision a few tokens may differ without being counted. Only the tokens before the first of them are
    compared from there on, and nothing if they are fewer than FEWEST.

    engine: of each of the engine's ranks. before, agreeing: as Compared says of what was computed before these.
    """
    found, worst = list[Compared](), before
    for name in trainer:
        if name.rpartition(".")[2] in OTHER_FUNCTIONS:
            continue
        is_router = name.rpartition(".")[2] in ROUTERS  # transformers' ones return their choice too
        theirs = trainer[name][:1] if is_router else trainer[name]
        errors = (_error(each, theirs) for each in _candidates(name, engine, trainer))
        fitting = [each[:agreeing] for each in errors if each is not None]
        if not fitting:
            continue
        if dtype != "float32" and agreeing is not None and agreeing < FEWEST:
            break
        best = min(fitting, key=lambda each: float(each.max()))
        error = float(best.sort().values[-1 - exceptions(len(best), dtype)])
        differs = best > TOLERANCE[dtype]
        agreeing = int(differs.int().argmax()) if differs.any() and error <= TOLERANCE[dtype] else len(best)
        share = float(differs.float().mean())
        found.append(Compared(name=name, error=error, tokens=share, before=worst, agreeing=agreeing))
        worst = max(worst, error)
    return found


def exceptions(tokens: int, dtype: str) -> int:
    """Return how many of so many tokens may differ in an output that agrees."""
    return 0 if dtype == "float32" else min(tokens - 1, max(SEVERAL, int(MANY * tokens)))


def first_difference(compared: Sequence[Compared], dtype: str) -> Compared | None:
    """Return the first output that differs although those before it do not."""
    return next((each for each in compared if each.is_first_difference(dtype)), None)


def layer_of(name: str) -> int | None:
    """Return the number of the decoder layer that a module belongs to; None outside of the layers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def suspects(compared: Sequence[Compared], dtype: str) -> list[int]:
    """Return the layers that may have made the first difference: that in which it shows, and the one before it."""
    first = first_difference(compared, dtype)
    if first is None or first.name == "embed_tokens":
        return []
    known = [layer for each in compared if (layer := layer_of(each.name)) is not None]
    shows = layer_of(first.name)
    last = max(known, default=0) if shows is None else shows
    return [layer for layer in (last - 1, last) if layer >= 0]


def in_order(coarse: Sequence[Compared], fine: Sequence[Compared], layers: Sequence[int]) -> list[Compared]:
    """Return the outputs of some layers in their place among those of the other layers."""
    early = [each for each in coarse if each.name != "norm" and (layer_of(each.name) or 0) < layers[0]]
    return [*early, *fine, *(each for each in coarse if each not in early)]


def routing_flips(engine: Outputs, trainer: Outputs) -> float | None:
    """Return the share of (token, router) pairs that choose other experts; None without routers."""
    names = [name for name in trainer if name.endswith(f".{ROUTED}") and name in engine]
    pairs = [(engine[name][0], trainer[name][0]) for name in names if engine[name][0].shape == trainer[name][0].shape]
    flips = [((ours > 0) != (theirs > 0)).any(-1) for ours, theirs in pairs]
    return float(torch.cat(flips).float().mean()) if flips else None


def different_fields(engine: Mapping[str, object], trainer: Mapping[str, object]) -> list[str]:
    """Return a phrase for each field of the model's config that both sides have with different values."""
    found = list[str]()
    for name in sorted(engine.keys() & trainer.keys() - NOT_COMPUTED):
        ours, theirs = engine[name], trainer[name]
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found += [f"{name}.{each}" for each in different_fields(ours, theirs)]
        elif ours != theirs and [ours, theirs] != SGLANGS_YARN:
            found.append(f"{name}: {_shown(ours)} in the engine, {_shown(theirs)} in the trainer")
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor | None:
    """Return the relative difference of each token's vector, [tokens]; None if the shapes do not fit."""
    errors = []
    for a, b in zip(ours, theirs, strict=False):
        if a.numel() != b.numel() or not b.numel():
            return None
        rows = b.shape[0]
        if a.shape[0] < rows or a.numel() % rows:
            return None
        a, b = a.reshape(rows, -1), b.reshape(rows, -1)
        if a.shape != b.shape:
            return None
        scale = b.norm(dim=-1) + 1e-6 * b.norm() / rows**0.5 + 1e-30
        errors.append((a - b).norm(dim=-1) / scale)
    return torch.stack(errors).amax(0).nan_to_num(nan=float("inf")) if errors else None


def in_proportion(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return our tensor by the factor that brings it nearest to theirs."""
    return ours * ((ours * theirs).sum() / (ours * ours).sum().clamp(min=1e-30))


def _candidates(name: str, engine: Sequence[Outputs], trainer: Outputs) -> Iterator[list[Tensor]]:
    """Yield what the engine's ranks may mean together by their outputs of this module."""
    parent, _, last = name.rpartition(".")
    for fused, parts in FUSED.items():
        own = f"{parent}.{fused}"
        if last in parts and all(own in each for each in engine):
            yield [
                _part(
                    [each[own][0] for each in engine],
                    [trainer.get(f"{parent}.{part}") for part in parts],
                    parts.index(last),
                )
            ]
    if any(name not in each for each in engine):
        return
    outputs = [each[name] for each in engine]
    if name == f"layers.{layer_of(name)}":
        # A pair is what is to be added to the residual stream, and the stream. Anything else does not show the stream.
        if len(outputs[0]) == 2:
            yield [outputs[0][0] + outputs[0][1]]
            yield [sum((each[0] for each in outputs), start=torch.zeros(())) + outputs[0][1]]
        return
    yield outputs[0]
    if last == "experts":  # SGLang may leave a constant factor of all experts to what comes after them
        theirs, summed = trainer[name][0], sum((each[0] for each in outputs), start=torch.zeros(()))
        yield from ([in_proportion(ours, theirs)] for ours in (outputs[0][0], summed) if ours.shape == theirs.shape)
    if len(outputs) > 1 and all(len(each) == len(outputs[0]) for each in outputs):
        yield [sum(copies, start=torch.zeros(())) for copies in zip(*outputs, strict=True)]
        yield [torch.cat(copies, dim=-1) for copies in zip(*outputs, strict=True)]


def _part(outputs: Sequence[Tensor], parts: Sequence[list[Tensor] | None], index: int) -> Tensor:
    """Return one checkpoint projection's output from that of a fused one on each rank; empty if it cannot be cut."""
    widths = [part[0].shape[-1] if part else 0 for part in parts]
    own, total = outputs[0].shape[-1], sum(widths)
    if not all(widths) or total % own:
        return torch.empty(0)
    ways = total // own
    if ways != len(outputs) or any(width % ways for width in widths):
        return torch.empty(0)
    start = sum(widths[:index]) // ways
    return torch.cat([each[..., start : start + widths[index] // ways] for each in outputs], dim=-1)
