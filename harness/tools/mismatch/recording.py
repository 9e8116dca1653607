"""What each module of a model computes for one sequence: in SGLang's scheduler, and in the trainer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

RECORDER = "_harness_recorder"
COARSE = r"(embed_tokens|layers\.\d+|layers\.\d+\.(input_layernorm|.*topk)|norm)"
"""The outputs that are compared first: one or two of each decoder layer, routers, and what stands around the layers.

Some releases of SGLang pass the residual stream from layer to layer in an object; the next norm shows it.
"""
ATTENTION, ROTARY, ROUTED = "attn", "rotary_emb", "topk"
"""SGLang's names of the attention itself, of what rotates its queries and keys, and of what chooses experts."""

ROUTERS, EXPERTS = ("gate", "router"), "experts"
WITH_INPUT, INPUT = ("o_proj", "down_proj"), " input"
"""Projections at the end of a block. What reaches them is kept under their name and INPUT: what is before them may be
in modules that only one side has, as in MLA."""

Outputs = dict[str, list[Tensor]]
"""Name of a module, from "layers." on -> its outputs, each [tokens, ...] float32, in host memory."""


@dataclass(slots=True)
class Recorder:
    """Collects the outputs of modules whose names match a pattern."""

    pattern: str
    outputs: Outputs = field(default_factory=dict)
    """In the order in which the modules first returned."""
    layer: int = 0
    """The decoder layer that computes now: SGLang's layers share one rotary embedding."""
    handles: list[Any] = field(default_factory=list)
    routed: set[str] = field(default_factory=set)
    """Names of the blocks whose router returns its choice."""

    def listen(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if layer := re.fullmatch(r".*\blayers\.(\d+)", name):
                self.handles.append(module.register_forward_pre_hook(self._enters(int(layer[1]))))
            if name.endswith(f".{EXPERTS}"):
                self.handles.append(module.register_forward_pre_hook(self._is_given_choices(name)))
            if short(name):
                self.handles.append(module.register_forward_hook(self._returns(name)))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def keep(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Add a module's outputs; those of a later part of the sequence follow those of the earlier one."""
        own = re.sub(r"^layers\.\d+", f"layers.{self.layer}", short(name))
        if own and re.fullmatch(self.pattern, own):
            new = [each.detach().float().cpu().clone() for each in tensors]
            known = self.outputs.get(own)
            self.outputs[own] = [torch.cat(pair) for pair in zip(known, new, strict=True)] if known else new

    def _enters(self, layer: int) -> Any:
        def enters(*_: Any) -> None:
            self.layer = layer

        return enters

    def _is_given_choices(self, name: str) -> Any:
        """Record which experts were chosen, from what the experts receive.

        In transformers 5.12 the block chooses, not the router.
        """
        parent = name.rpartition(".")[0]

        def is_given(module: Any, inputs: Any) -> None:
            if parent in self.routed or len(inputs) < 3 or not isinstance(inputs[1], Tensor):
                return
            self.keep(f"{parent}.{ROUTED}", [chosen(inputs[2], inputs[1], module.num_experts)])

        return is_given

    def _returns(self, name: str) -> Any:
        parent, _, last = name.rpartition(".")

        def returns(module: nn.Module, inputs: Any, output: Any) -> None:
            if last == ROUTED and hasattr(output, "topk_ids"):
                self.keep(name, [chosen(output.topk_weights, output.topk_ids, output.router_logits.shape[-1])])
                return
            if last in WITH_INPUT and inputs:
                self.keep(f"{name}{INPUT}", [inputs[0]])
            self.keep(name, [each for each in _tensors(output) if each.is_floating_point() and each.ndim >= 2])
            if last in ROUTERS and isinstance(output, tuple) and len(output) == 3:  # as transformers' routers
                self.routed.add(parent)
                self.keep(f"{parent}.{ROUTED}", [chosen(output[1], output[2], output[0].shape[-1])])

        return returns


def short(name: str) -> str:
    """Return a module's name as both sides have it: from "layers." on, or its last part outside of the layers."""
    found = re.search(r"\blayers\.\d+.*", name)
    return found[0] if found else name.rpartition(".")[2]


def chosen(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Return each expert's share of each token, [tokens, experts]; 0 for those that were not chosen.

    weights, ids: [tokens, k], where an id of -1 or beyond `experts` is no expert of the router's.
    """
    is_own = (ids >= 0) & (ids < experts)
    own = torch.where(is_own, weights.float(), 0.0)
    shares = torch.zeros(ids.shape[0], experts, device=weights.device)
    shares.scatter_add_(1, torch.where(is_own, ids, 0).long(), own)
    return shares / shares.sum(-1, keepdim=True).clamp(min=1e-20)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)


# In SGLang's scheduler


def start_recording(model: nn.Module, pattern: str) -> None:
    """Record from here on what the modules return whose short names match the pattern."""
    recorder = Recorder(pattern)
    recorder.listen(model)
    object.__setattr__(model, RECORDER, recorder)


def recorded(model: nn.Module, tokens: int) -> dict[str, list[Any]]:
    """Stop recording; return what the modules computed for the first `tokens` tokens, as arrays of numpy.

    SGLang pickles tensors by handles; arrays travel by value.
    """
    recorder: Recorder = getattr(model, RECORDER)
    recorder.stop()
    object.__delattr__(model, RECORDER)
    return {name: [_by_token(each, tokens).numpy() for each in outputs] for name, outputs in recorder.outputs.items()}


def _by_token(output: Tensor, tokens: int) -> Tensor:
    """Return [tokens, ...] of an output that may have a row for each head of each token, or padding at its end."""
    return output[:tokens] if output.shape[0] % tokens else output.reshape(tokens, -1)


def as_tensors(arrays: Mapping[str, Sequence[Any]]) -> Outputs:
    """Return what `recorded` returned as tensors."""
    return {name: [torch.from_numpy(each) for each in some] for name, some in arrays.items()}


def config_fields(model: Any, _: object) -> Mapping[str, Any]:
    """Return the plain fields of the config with which SGLang has built its model."""
    return plain_fields(model.config.to_dict()) if hasattr(model, "config") else {}


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose values are numbers, strings, or lists and tables of them."""
    plain = (bool, int, float, str, list, dict, type(None))
    return {name: value for name, value in fields.items() if isinstance(value, plain)}


# In the trainer


@contextmanager
def trainer_recording(model: nn.Module, pattern: str) -> Iterator[Outputs]:
    """Record what the trainer's modules return in this block for one sequence: [tokens, ...] each.

    Attention and rotated queries and keys get SGLang's names; transformers computes them in functions.
    """
    recorder = Recorder(pattern)
    recorder.listen(model)
    names = {id(module): name for name, module in model.named_modules()}
    kind = model.config._attn_implementation  # type: ignore[union-attr]
    real = ALL_ATTENTION_FUNCTIONS.get(kind)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        output = real(module, query, key, value, *rest, **options)
        own = names[id(module)]
        recorder.keep(f"{own}.{ROTARY}", [each.transpose(1, 2).flatten(2)[0] for each in (query, key)])
        recorder.keep(f"{own}.{ATTENTION}", [output[0].flatten(2)[0]])
        return output

    if real is not None:
        ALL_ATTENTION_FUNCTIONS[kind] = attention
    outputs: Outputs = {}
    try:
        yield outputs
    finally:
        recorder.stop()
        if real is not None:
            ALL_ATTENTION_FUNCTIONS[kind] = real
    for name, found in recorder.outputs.items():
        outputs[name] = [each[0] if each.ndim > 2 and each.shape[0] == 1 else each for each in found]
