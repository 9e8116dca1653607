"""Routers that compute in float32, on the weights and inputs that they have: the trainer's, and those in SGLang's
scheduler.

Some classes do so by themselves (DeepSeek's in transformers), others in the precision of the model. So each router's
own scores are compared with those in float32: where they are the same, nothing was changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from harness.tools.mismatch.recording import ROUTERS

EXACT = "_harness_exact_routers"
NOTHING = 1e-5
"""Relative difference of a router's scores up to which they were computed in float32: sums in another order differ by
1e-6."""
ROUNDING = {"float16": 2.0**-8, "bfloat16": 2.0**-5}
"""Relative difference of a router's scores up to which it may be their precision: four times the distance between two
numbers."""


@dataclass(slots=True)
class Exactness:
    """Has routers compute in float32, and keeps how far their own scores were from that."""

    calls: int = 0
    error: float = 0.0
    """The largest difference of a score, relative to the largest score of the same call."""
    inside: bool = False
    handles: list[Any] = field(default_factory=list)

    def listen(self, model: nn.Module, by_function: bool) -> None:
        """by_function: compute the whole forward in float32, as transformers' routers choose experts as well; else its
        product.
        """
        for router in routers_of(model):
            replaced = self._by_forward if by_function else self._by_product
            self.handles.append(router.register_forward_hook(replaced, with_kwargs=True))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _by_forward(self, router: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        if self.inside:  # called from below
            return None
        wide = {name: each.float() if each.is_floating_point() else each for name, each in _tensors_of(router)}
        self.inside = True
        try:
            exact = functional_call(
                router, wide, tuple(map(_wide, inputs)), {key: _wide(each) for key, each in named.items()}
            )
        finally:
            self.inside = False
        self._compare(_scores(output), _scores(exact))
        return exact

    def _by_product(self, router: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        hidden = inputs[0] if inputs else named["hidden_states"]
        weight: Any = router.weight
        bias: Any = getattr(router, "bias", None)
        exact = nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        self._compare(_scores(output), exact)
        return (exact, *output[1:]) if isinstance(output, tuple) else exact

    def _compare(self, own: Tensor, exact: Tensor) -> None:
        self.calls += 1
        own, exact = own.detach(), exact.detach()
        if exact.numel():
            gap = (own.float() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
            self.error = max(self.error, float(gap))


def routers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that score the experts beside them, in the trainer's model or in SGLang's."""
    for block in model.modules():
        children = dict(block.named_children())
        if "experts" in children:
            yield from (each for name, each in children.items() if name in ROUTERS and hasattr(each, "weight"))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _scores(output: Any) -> Tensor:
    scores: Tensor = output[0] if isinstance(output, tuple) else output
    return scores


# In the trainer


@contextmanager
def exact_routers(model: nn.Module) -> Iterator[Exactness]:
    """Have the routers of a trainer's model compute in float32 in this block."""
    exactness = Exactness()
    exactness.listen(model, by_function=True)
    try:
        yield exactness
    finally:
        exactness.stop()


# In SGLang's scheduler


def start_exact_routers(model: nn.Module, _: object) -> None:
    """Have the routers of SGLang's model compute in float32 from here on."""
    exactness = Exactness()
    exactness.listen(model, by_function=False)
    object.__setattr__(model, EXACT, exactness)


def stop_exact_routers(model: nn.Module, _: object) -> tuple[int, float]:
    """Undo start_exact_routers.

    Return how often the routers were called, and how far their own scores were from float32's.
    """
    exactness: Exactness = getattr(model, EXACT)
    exactness.stop()
    object.__delattr__(model, EXACT)
    return exactness.calls, exactness.error
