"""What one trainer rank holds at the model's true size, by executing one step of it on fake tensors.

Fake tensors have shapes, dtypes and storages, but no memory. The model is transformers' own, sharded by the trainer's
own `shard` under a process group of any size that sends nothing, and what runs is the trainer's own: the log-probs, the
actor's or critic's loss, its backward, and AdamW. torch's MemTracker counts the bytes of every storage that is alive.

Rank 0 is executed: FSDP2 gives it as many rows of each tensor as any rank has. Layers that repeat are executed a few
times only, see `Repeats`. Two things are as on a GPU, though no GPU is there: AdamW works on all tensors at once
(foreach), and attention is torch's memory-efficient kernel, which keeps no matrix of scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.schema import Config
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.full_size.gpu_stages import longest_sequence
from harness.trainer.actor import Actor, token_log_probs
from harness.trainer.batch import Batch
from harness.trainer.critic import Critic, token_values
from harness.trainer.model import allocate, build_on_meta, choose_attention, decoder_layers, named_tensors, shard
from harness.trainer.offload import local
from harness.trainer.rows import RowShards

Role = Literal["actor", "critic", "reference"]
CPU = torch.device("cpu")
STEADY = 2
"""Periods of layers to execute before what one more adds is taken as that of each further one: FSDP2 gathers one unit
ahead and reduces one behind, so the first and the last differ from those between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPeaks:
    """Bytes of one model on the fullest trainer rank."""

    parameters: int
    """Its shards. Gradients, and each of AdamW's two moments, are as large."""
    forward: int
    """What the log-probs or values of a microbatch hold at most, beside the shards."""
    update: int
    """What forward and backward of a microbatch hold at most, beside shards and moments; gradients included."""
    optimizer: int
    """What AdamW holds at most, beside shards, moments and gradients."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which decoder layers to execute: `first` of them, and `period` more, which `times` such periods follow in the
    model.
    """

    first: int
    period: int
    times: float

    def whole(self, few: int, more: int) -> int:
        """Return the bytes of the whole model, from those of the first layers, and of one period more."""
        return round(few + (more - few) * self.times)


def repeats_of(kinds: Sequence[Any]) -> Repeats:
    """Return which layers to execute for layers of these kinds.

    Without a period that repeats, all of them, and none more.
    """
    count = len(kinds)
    for period in range(1, count // (STEADY + 1) + 1):
        start = next(at for at in range(count + 1) if kinds[at : count - period] == kinds[at + period :])
        steady = start + STEADY * period
        first = steady + (count - steady) % period
        if steady < first + period < count:
            return Repeats(first, period, (count - first) / period)
    return Repeats(count, 0, 0.0)


def layer_kinds(model: Any, layers: nn.ModuleList) -> list[Any]:
    """Return for each layer what decides its memory: its modules' classes, its parameters, and its kind of
    attention.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    return [
        (kind, *((name, type(each).__name__) for name, each in layer.named_modules()),
         *((name, each.shape, each.dtype) for name, each in layer.named_parameters()))
        for kind, layer in zip(kinds, layers, strict=True)
    ]  # fmt: skip


def trainer_peaks(execution: "Execution", executed: Sequence[TrainerPeaks]) -> TrainerPeaks:
    """Return what the fullest rank of the whole model holds. executed: what the `layers_to_execute` of it did."""
    few, more = executed[0], executed[-1]
    repeats = execution.repeats()
    return TrainerPeaks(
        parameters=execution.parameter_bytes(),
        forward=repeats.whole(few.forward, more.forward),
        update=repeats.whole(few.update, more.update),
        optimizer=repeats.whole(few.optimizer, more.optimizer),
    )


def fullest_rank_bytes(model: nn.Module, ranks: int) -> int:
    """Return the bytes of parameters and persistent buffers on rank 0, by FSDP2's row rule. No rank has more."""
    found = 0
    for _, tensor in named_tensors(model):
        if not isinstance(tensor, nn.Parameter):
            found += tensor.numel() * torch.float32.itemsize if tensor.is_floating_point() else tensor.nbytes
            continue
        shards = RowShards(tensor.shape[0], tensor[0].numel(), ranks)
        found += len(shards.rows_of(0)) * shards.row_elements * tensor.itemsize
    return found


def with_fake_buffers(model: nn.Module) -> None:
    """Replace a model's buffers on the meta device by fake ones of the CPU. Call it in a fake mode."""
    for module in model.modules():
        for name, each in module._buffers.items():
            if each is not None:
                module._buffers[name] = torch.empty_like(each, device=CPU)


def _master_dtype(config: Config, role: Role) -> torch.dtype:
    """Return the dtype of a model's shards; a reference is never updated, and kept in the dtype in which it
    computes.
    """
    found = getattr(torch, config.model.dtype if role == "reference" else config.model.master_dtype)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A step of one model on rank 0, on fake tensors."""

    model_config: Any
    """transformers'."""
    config: Config
    ranks: int
    """All trainer ranks."""
    role: Role
    layers: int | None = None
    """How many decoder layers to execute, from the first one on. None: all."""

    def layers_to_execute(self) -> list[int]:
        """Return numbers of layers whose executions tell what all of them hold; see trainer_peaks."""
        repeats = self.repeats()
        return [repeats.first, repeats.first + repeats.period][: 1 + bool(repeats.period)]

    def repeats(self) -> Repeats:
        backbone, _ = self._on_meta(_master_dtype(self.config, self.role), "eager", False)
        return repeats_of(layer_kinds(backbone, decoder_layers(backbone)))

    def parameter_bytes(self) -> int:
        """Return the bytes of the whole model's shards on this rank."""
        _, model = self._on_meta(_master_dtype(self.config, self.role), "eager", False)
        return fullest_rank_bytes(model, self.ranks)

    def _on_meta(self, dtype: torch.dtype, attention: Any, checkpointing: bool) -> tuple[Any, Any]:
        # accelerate moves parameters to the meta device one by one after they are made, which takes the memory of each
        # one.
        with torch.device("meta"):
            return build_on_meta(self.model_config, dtype, attention, checkpointing, self.role == "critic")

    def _sharded(self, mode: FakeTensorMode, mesh: DeviceMesh) -> Any:
        wanted = self.config.model
        attention, _ = choose_attention(self.model_config, _without_flash(wanted.attention), wanted.packed)
        checkpointing = self.role != "reference" and self.config.actor.gradient_checkpointing
        backbone, model = self._on_meta(_master_dtype(self.config, self.role), attention, checkpointing)
        blocks = decoder_layers(backbone)
        del blocks[self.layers if self.layers is not None else len(blocks) :]
        shard(model, blocks, mesh, getattr(torch, wanted.dtype))
        with mode:
            with_fake_buffers(model)
            allocate(model, CPU)
        return model

    def run(self) -> TrainerPeaks:
        """Execute a forward, and for a learner also a backward and AdamW's step. Leaves a fake process group behind.

        Raise UnsupportedEnvironment for experts that torch multiplies on real tensors alone, and whatever transformers
        or FSDP2 raises for a model that they cannot train.
        """
        mesh, mode = _fake_mesh(self.ranks), FakeTensorMode(allow_non_fake_inputs=True)
        model = self._sharded(mode, mesh)
        _check_experts(model, self.config.model.dtype)
        held = sum(local(tensor).nbytes for _, tensor in named_tensors(model))
        with mode, _attention_of_a_gpu():
            batch = _batch(self.config, self.role)
            with MemTracker() as tracker:
                tracker.track_external(model)
                with torch.no_grad():
                    self._forward(model, batch)
                forward = _peak(tracker) - held
            if self.role == "reference":
                return TrainerPeaks(parameters=held, forward=forward, update=0, optimizer=0)
            learner = (Critic if self.role == "critic" else Actor)(model, self.config, mesh, CPU)
            with MemTracker() as tracker:
                tracker.track_external(model)
                learner.after_backward.append(tracker.reset_mod_stats)  # of the modules; the peak stays
                learner.backward([batch] * self._microbatches(), batch.input_ids.numel())
                update = _peak(tracker) - held
            model.zero_grad()
            return TrainerPeaks(parameters=held, forward=forward, update=update, optimizer=_optimizer_bytes(model))

    def _microbatches(self) -> int:
        """Return 2 if the rank's part of a minibatch is more than one microbatch: gradients are then there from the
        start.
        """
        rows = -(-self.config.actor.minibatch_size // self.ranks)
        return min(2, -(-rows // microbatch_rows(self.config)))

    def _forward(self, model: nn.Module, batch: Batch) -> None:
        if self.role == "critic":
            token_values(model, batch, self.config.model.packed)
        else:
            token_log_probs(model, batch, self.config.rollout.temperature, packed=self.config.model.packed)


def _check_experts(model: nn.Module, dtype: str) -> None:
    if dtype != "bfloat16" and any(".experts." in name and each.ndim == 3 for name, each in model.named_parameters()):
        raise UnsupportedEnvironment(
            "torch's product of all experts at once (_grouped_mm) takes fake tensors in bfloat16 alone, so the trainer's memory"
            f' cannot be executed with model.dtype = "{dtype}"; use "bfloat16", or ask about one engine alone, by a MODEL'
        )


def _optimizer_bytes(model: nn.Module) -> int:
    """Return what AdamW's step holds beside parameters, gradients and moments: on the shards alone, as plain tensors.

    MemTracker would count a DTensor as if this rank held all of it.
    """
    shards = [nn.Parameter(torch.empty_like(local(each))) for each in model.parameters()]
    for each in shards:
        each.grad = torch.empty_like(each)
    optimizer = torch.optim.AdamW(shards, foreach=True)
    found = 0
    for _ in range(2):  # the first step makes the moments
        with MemTracker() as tracker:
            tracker.track_external(optimizer, *shards, *(each.grad for each in shards if each.grad is not None))
            optimizer.step()
            found = _peak(tracker)
    return found - 4 * sum(each.nbytes for each in shards)


def microbatch_rows(config: Config) -> int:
    """Return how many sequences of full length a microbatch has."""
    updates = config.actor
    if updates.tokens_per_microbatch:
        return max(1, updates.tokens_per_microbatch // longest_sequence(config))
    return updates.microbatch_size


def _batch(config: Config, role: Role) -> Batch:
    """Return one microbatch of fake tensors, as large as the config lets one become, with all that a loss may ask
    for.
    """
    tokens = longest_sequence(config)
    rows = microbatch_rows(config)
    whole = torch.ones(rows, tokens, dtype=torch.int64)
    numbers = torch.zeros(rows, tokens)
    return Batch(
        input_ids=whole, attention_mask=whole, response_mask=whole, rollout_log_probs=numbers, old_log_probs=numbers,
        reference_log_probs=numbers, old_values=numbers, advantages=numbers, returns=numbers,
    )  # fmt: skip


def _without_flash(attention: str) -> Any:
    """Return sdpa for flash_attention_2, whose package a machine without a GPU lacks; both keep no matrix of scores."""
    return "sdpa" if attention == "flash_attention_2" else attention


def _peak(tracker: MemTracker) -> int:
    """Return the bytes that were alive at most."""
    return sum(int(kinds["Total"]) for kinds in tracker.get_tracker_snapshot("peak").values())


def _fake_mesh(ranks: int) -> DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,))


@contextmanager
def _attention_of_a_gpu() -> Iterator[None]:
    """Have scaled_dot_product_attention allocate in this block what it allocates on a GPU, where a mask is given.

    torch chooses the kernel by the device, and the CPU's keeps the matrix of scores for some shapes of heads.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        bias = attn_mask
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype)
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        keep = torch.is_grad_enabled() and query.requires_grad
        found: Tensor = kernel(query, key, value, bias, keep, dropout_p, is_causal, scale=scale)[0]
        return found

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield
