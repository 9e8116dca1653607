"""The experts that tokens are sent to: what the trainer's routers choose, and a replay of what the engine's chose.

A router of transformers scores all experts of a layer and calls torch.topk on the scores; what follows, gathering
weights, normalizing, scaling, differs from model to model. So that one call is watched, inside the module that owns the
layer's experts. In a replay it returns the experts that the engine took, with the scores that this router gives them:
their weights, and the gradient, are then this router's own. This is rollout routing replay (R3, arXiv 2510.11370).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from harness.config.layers import ConfigError
from harness.trainer.batch import Batch
from harness.trainer.packing import align

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NOT_RECORDED = -1


class RoutingNotSeen(ConfigError):
    """The model chooses its experts in a way that is not watched here."""


def routed_shape(model_path: str) -> tuple[int, int]:
    """Return (layers, experts of a token) of a model's config: SGLang reports the experts of a token in this shape.

    Layers without experts count too. Raise ConfigError for a model that has no experts.
    """
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    if not chosen:
        raise ConfigError(
            f'{model_path} has no experts, or no num_experts_per_tok in its config, which SGLang needs to report them; set rollout.routing = "off"'
        )
    return config.num_hidden_layers, chosen


class WatchedChoice(TorchFunctionMode):
    """Sees torch.topk over all experts of a layer, and in a replay replaces its result."""

    def __init__(self, experts: int, replayed: Tensor | None) -> None:
        """replayed: [N, K], NOT_RECORDED in rows where the router decides itself; None: it always does."""
        super().__init__()
        self.experts, self.replayed = experts, replayed
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call func; watch it if it chooses experts. Groups of experts, which DeepSeek chooses first, are fewer."""
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.ndim != 2 or scores.shape[1] != self.experts:
            return found
        if self.replayed is not None:
            indices = torch.where(self.replayed >= 0, self.replayed.to(found[1].dtype), found[1])
            found = torch.return_types.topk((scores.gather(1, indices), indices))
        self.chosen = found[1].detach()
        return found


class Routers:
    """The layers of a model that have experts, and their routers' choices for one microbatch after the other."""

    def __init__(self, model: nn.Module) -> None:
        """Raise RoutingNotSeen if the model has no layer with experts."""
        self._recorded: Tensor | None = None  # [N, L, K], in the order of the tokens that the model computes
        self._replays = False
        self._open: list[WatchedChoice | None] = []
        self._chosen: dict[int, Tensor] = {}
        self.model_name = type(model).__name__
        self.experts = {layer: number_of_experts(block) for layer, block in blocks_of(model).items()}
        if not self.experts:
            raise RoutingNotSeen(f'{self.model_name} has no layer with a module "experts"; set rollout.routing = "off"')
        for layer, block in blocks_of(model).items():
            block.register_forward_pre_hook(partial(self._enter, layer))
            block.register_forward_hook(partial(self._leave, layer), always_call=True)

    def follow(self, batch: Batch, packed: bool, *, replay: bool) -> None:
        """Watch the forward of this microbatch from here on, and its recomputation; replay: take the engine's experts.

        The batch needs routed_experts.
        """
        recorded = batch.require("routed_experts")
        self._recorded = recorded[batch.attention_mask.bool()] if packed else recorded.flatten(0, 1)
        self._replays, self._chosen = replay, {}

    def rest(self) -> None:
        """Watch nothing until the next `follow`."""
        self._recorded, self._chosen = None, {}

    def differing_layers(self, batch: Batch, packed: bool) -> Tensor:
        """Return in how many layers the token before took other experts in the engine than it was sent to here: float
        [B, T].

        Position t is about token t, as log-probs are: its distribution was computed from the token before. NOT_RECORDED
        where the engine did not say. Call it after the forward of the batch that `follow` was given.
        """
        assert self._recorded is not None
        if missing := self.experts.keys() - self._chosen.keys():
            raise RoutingNotSeen(
                f"{self.model_name} chooses the experts of layer {min(missing)} without torch.topk over all of them, so the"
                ' trainer\'s choice cannot be seen; set rollout.routing = "off"'
            )
        layers = sorted(self.experts)
        mine = torch.stack([self._chosen[layer] for layer in layers], dim=1).sort(-1).values
        engines = self._recorded[:, layers].sort(-1).values
        differing = (mine != engines).any(-1).sum(-1).float()
        differing = differing.masked_fill((self._recorded == NOT_RECORDED).all(-1).all(-1), NOT_RECORDED)
        rows = differing[None] if packed else differing.view(batch.input_ids.shape)
        return align(rows[:, :-1], batch, packed)

    def _enter(self, layer: int, block: nn.Module, _: Any) -> None:
        choice = None
        if self._recorded is not None:
            choice = WatchedChoice(self.experts[layer], self._recorded[:, layer] if self._replays else None)
            choice.__enter__()
        self._open.append(choice)

    def _leave(self, layer: int, block: nn.Module, *_: Any) -> None:
        if (choice := self._open.pop()) is not None:
            choice.__exit__(None, None, None)
            if choice.chosen is not None:
                self._chosen[layer] = choice.chosen


def blocks_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the module of each decoder layer that owns the layer's experts, by the number of the layer."""
    found = {}
    for name, module in model.named_modules():
        if (layer := LAYER.search(f"{name}.")) and "experts" in dict(module.named_children()):
            found[int(layer[1])] = module
    return found


def number_of_experts(block: nn.Module) -> int:
    """Return how many experts a block has: one module with all of them, or a list of modules."""
    experts: Any = block.experts
    return int(experts.num_experts if hasattr(experts, "num_experts") else len(experts))


def scatter_routing(recorded: list[Any], shape: tuple[int, int], batch: Batch) -> Tensor:
    """Return the experts that the engine reported, aligned with the batch: int32 [B, T, L, K], NOT_RECORDED elsewhere.

    recorded: for each sequence an array [tokens, L, K] of its first tokens (no token follows the last one, so it is
    never routed), or None. shape: (L, K).
    """
    routed = torch.full((*batch.input_ids.shape, *shape), NOT_RECORDED, dtype=torch.int32)
    for row, (experts, tokens) in enumerate(zip(recorded, batch.attention_mask.sum(-1).tolist(), strict=True)):
        if experts is not None:
            known = torch.as_tensor(experts)[: tokens - 1]
            routed[row, : len(known)] = known
    return routed
