"""Senders: how the weight sync of a foreign stack reaches a server, right and in the ways that users reported.

Each takes a Stack and sends its newer version to a server that holds the older one. A broken one names the public report
that it is like, where one is known. It raises DoesNotApply where the model has nothing that could break so.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.rollout.update_group import UpdateGroup
from tests.tools.verify.plain_server import PlainServer
from tests.tools.verify.versions import is_tied

Weights = dict[str, Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERT = re.compile(r"\.experts\.(\d+)\.")
EVERY_CALL = 10**9


class DoesNotApply(Exception):
    """The model has nothing that this sender could break."""


@dataclass
class Stack:
    """A trainer that shares nothing with the server but its URL, and two versions of the weights."""

    server: PlainServer
    new_folder: Path
    was_folder: Path
    scratch: Path

    @cached_property
    def new(self) -> Weights:
        return read_weights(self.new_folder)

    @cached_property
    def was(self) -> Weights:
        return read_weights(self.was_folder)

    @contextmanager
    def update(self) -> Iterator[None]:
        self.server.post("begin_weight_update")
        try:
            yield
        finally:
            self.server.post("end_weight_update")

    def send(self, weights: Weights, in_a_call: int = EVERY_CALL, load_format: str | None = None) -> None:
        """Send the same to every rank, so many tensors in each call."""
        with self.update():
            for bucket in batched(weights.items(), in_a_call):
                self.server.send_tensors([bucket] * self.server.tp, load_format)

    def load(self, folder: Path) -> None:
        self.server.post("update_weights_from_disk", model_path=str(folder), load_format="auto")

    def save(self, weights: Weights, files: int = 1) -> Path:
        """Write a checkpoint of these weights and the newer version's config."""
        folder = self.scratch / f"saved{len(list(self.scratch.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text((self.new_folder / "config.json").read_text())
        for number, bucket in enumerate(batched(weights.items(), -(-len(weights) // files))):
            named = {name: tensor.contiguous() for name, tensor in bucket}
            save_file(named, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        return folder

    def last_layer(self, *endings: str) -> str:
        """Return the name in the last decoder layer that has the first of these endings that any name has."""
        for ending in endings:
            if found := [name for name in self.new if name.endswith(ending) and ".layers." in name]:
                return max(found, key=lambda name: int(re.findall(r"\.layers\.(\d+)\.", name)[0]))
        raise DoesNotApply(f"no {', '.join(endings)}")


Sender = Callable[[Stack], None]


def read_weights(folder: Path) -> Weights:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def batched(items: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    rest = iter(items)
    while bucket := list(islice(rest, size)):
        yield bucket


# Broken in twelve ways, some of them in two forms.


def split_pair(stack: Stack) -> None:
    """sglang#14178, #38298: the two halves of a fused projection come in different calls."""
    pair = "q_a_proj.weight", "kv_a_proj_with_mqa.weight"
    stack.last_layer(pair[0])
    first = {name: each for name, each in stack.new.items() if not name.endswith(pair[1])}
    rest = {name: each for name, each in stack.new.items() if name.endswith(pair[1])}
    with stack.update():
        for weights in (first, rest):
            stack.server.send_tensors([list(weights.items())] * stack.server.tp)


def live_names(stack: Stack) -> None:
    """verl#6210, slime#2004: names of the live model: transformers 5 packs the experts of a layer in one tensor."""
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(stack.new.items(), key=_expert_number):
        if EXPERT.search(name):
            layers.setdefault(EXPERT.sub(".experts.", name), []).append(tensor)
    if not layers:
        raise DoesNotApply("no experts")
    packed = {name.removesuffix(".weight"): torch.stack(each) for name, each in layers.items()}
    for name in [name for name in packed if name.endswith("gate_proj")]:
        up = packed.pop(name.replace("gate_proj", "up_proj"))
        packed[name.replace("gate_proj", "gate_up_proj")] = torch.cat([packed.pop(name), up], 1)
    stack.send({name: each for name, each in stack.new.items() if not EXPERT.search(name)} | packed)


def wrapped_names(stack: Stack) -> None:
    """verl#2702: names as LoRA's wrapper has them (base_layer): some of SGLang's classes ignore them, others die."""
    adapted = re.compile(r"(self_attn\.\w+_proj)\.weight$")
    stack.send({adapted.sub(r"\1.base_layer.weight", name): each for name, each in stack.new.items()})


def float8_without_scales(stack: Stack) -> None:
    """One matrix comes quantized to FP8, and the server holds it unquantized: its scales are lost. No report known."""
    name = stack.last_layer("o_proj.weight")
    scale = stack.new[name].float().abs().max() / 448
    stack.send(stack.new | {name: (stack.new[name].float() / scale).to(torch.float8_e4m3fn).to(stack.new[name].dtype)})


def rounded_to_bfloat16(stack: Stack) -> None:
    """sglang#8729, Automodel#2553: model.to(bfloat16) rounds what the engine holds in float32."""
    if not any(each.dtype == torch.float32 for each in stack.new.values()):
        raise DoesNotApply("no float32")
    stack.send({name: each.bfloat16() for name, each in stack.new.items()})


def missing_buffer(stack: Stack) -> None:
    """miles#2706: named_parameters() is sent, and a buffer of the checkpoint is not among them."""
    buffer = stack.last_layer("e_score_correction_bias")
    ending = buffer.rpartition(".")[2]
    stack.send({name: each for name, each in stack.new.items() if not name.endswith(ending)})


def transposed(stack: Stack) -> None:
    """slime#1840: a square matrix as input by output; with other sizes its shape would tell."""
    square = [name for name, each in stack.new.items() if each.ndim == 2 and each.shape[0] == each.shape[1]]
    if not square:
        raise DoesNotApply("no square matrix")
    stack.send(stack.new | {square[-1]: stack.new[square[-1]].t().contiguous()})


def storage_of_a_view(stack: Stack) -> None:
    """verl#6919: the exporter's tensor is a strided view; here the bytes of its storage are sent as they lie."""
    name = stack.last_layer("down_proj.weight")
    stack.send(stack.new | {name: stack.new[name].mT.contiguous().reshape(stack.new[name].shape)})


def stale_tensor(stack: Stack) -> None:
    """miles#2605: one write fails, and the update answers success."""
    name = stack.last_layer("k_proj.weight", "kv_b_proj.weight")
    stack.send({other: each for other, each in stack.new.items() if other != name})


def frozen_base(stack: Stack) -> None:
    """verl#7495: every sync pushes the weights of before the training."""
    stack.send(stack.was)


def expert_order(stack: Stack) -> None:
    """vime#388: experts are numbered with the EP ranks in another order."""
    experts = {int(found[1]) for name in stack.new if (found := EXPERT.search(name))}
    if not experts:
        raise DoesNotApply("no experts")
    half = len(experts) // 2

    def renumbered(name: str) -> str:
        return EXPERT.sub(lambda found: f".experts.{(int(found[1]) + half) % len(experts)}.", name)

    stack.send({renumbered(name): each for name, each in stack.new.items()})


def head_taken_for_tied(stack: Stack) -> None:
    """sglang#6626: the head's buffer has been overwritten with the embedding when it is read."""
    if is_tied(stack.new_folder):
        raise DoesNotApply("the head is tied")
    stack.send(stack.new | {HEAD: stack.new[EMBEDDING].clone()})


def tied_under_the_heads_name(stack: Stack) -> None:
    """labs-molt#26 sends one of two tied names; here it is the one that the engine skips, the head's."""
    if not is_tied(stack.new_folder):
        raise DoesNotApply("the head is not tied")
    stack.send({HEAD if name == EMBEDDING else name: each for name, each in stack.new.items()})


def half_of_it_zero(stack: Stack) -> None:
    """slime#2280: shards are sent ungathered; here the rest of the matrix stays zero."""
    name = stack.last_layer("o_proj.weight")
    half = stack.new[name].clone()
    half[len(half) // 2 :] = 0
    stack.send(stack.new | {name: half})


def half_of_it_stale(stack: Stack) -> None:
    """miles#2605: of a large tensor, sent in two pieces, the second one does not arrive."""
    mixed = stack.new[EMBEDDING].clone()
    mixed[len(mixed) // 2 :] = stack.was[EMBEDDING][len(mixed) // 2 :]
    stack.send(stack.new | {EMBEDDING: mixed})


def all_nan(stack: Stack) -> None:
    """slime#929: the buffer is reused before it is sent; here it holds no numbers."""
    name = stack.last_layer("o_proj.weight")
    stack.send(stack.new | {name: torch.full_like(stack.new[name], torch.nan)})


def gate_up_swapped(stack: Stack) -> None:
    """A fused projection is cut in the wrong order: gate under the name of up, and up under gate's. No report known."""
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    pair = re.compile(r"\b(gate_proj|up_proj)\b")
    stack.send({pair.sub(lambda found: swap[found[1]], name): each for name, each in stack.new.items()})


def shards_in_wrong_order(stack: Stack) -> None:
    """sglang#24655: a rank takes the payload of another; here each gets another's shard."""
    name = stack.last_layer("o_proj.weight")
    shards = stack.new[name].chunk(stack.server.tp, 1)
    stack.send(stack.new | {name: torch.cat(shards[::-1], 1)})


def first_shard_for_all(stack: Stack) -> None:
    """verl#2336: what rank 0 gives is sent to every rank."""
    name = stack.last_layer("o_proj.weight")
    shard = stack.new[name].chunk(stack.server.tp, 1)[0]
    stack.send(stack.new | {name: torch.cat([shard] * stack.server.tp, 1)})


def last_rank_left_out(stack: Stack) -> None:
    """verl#2455: a step reaches only some TP ranks; here the last one keeps the older version."""
    new, was = list(stack.new.items()), list(stack.was.items())
    with stack.update():
        stack.server.send_tensors([new] * (stack.server.tp - 1) + [was])


def each_rank_in_its_own_way(stack: Stack) -> None:
    """One matrix stays old on the first ranks, and arrives as no numbers on the last. No report known."""
    name = stack.last_layer("k_proj.weight", "kv_b_proj.weight")
    stale = stack.new | {name: stack.was[name]}
    no_numbers = stack.new | {name: torch.full_like(stack.new[name], torch.nan)}
    with stack.update():
        stack.server.send_tensors([list(stale.items())] * (stack.server.tp - 1) + [list(no_numbers.items())])


def folder_without_a_file(stack: Stack) -> None:
    """From a folder in which one of the checkpoint's files is not written yet. No report known."""
    folder = stack.save(stack.new, files=4)
    max(folder.glob("*.safetensors")).unlink()
    stack.load(folder)


def norms_off_by_one(stack: Stack) -> None:
    """Norms as the trainer's zero-centered ones (Megatron's layernorm_1p), one less than the checkpoint's. No report known."""
    stack.send({name: each - 1 if name.endswith("norm.weight") else each for name, each in stack.new.items()})


BROKEN: Sequence[Sender] = (
    split_pair, live_names, wrapped_names, float8_without_scales, rounded_to_bfloat16, missing_buffer, transposed,
    storage_of_a_view, stale_tensor, frozen_base, expert_order, head_taken_for_tied, tied_under_the_heads_name,
    half_of_it_zero, half_of_it_stale, all_nan, gate_up_swapped, shards_in_wrong_order, first_shard_for_all,
    last_rank_left_out, each_rank_in_its_own_way, folder_without_a_file, norms_off_by_one,
)  # fmt: skip


# Right, in twelve ways and more.


def in_one_call(stack: Stack) -> None:
    """All names in one call."""
    stack.send(stack.new)


def name_by_name(stack: Stack) -> None:
    """One call for each name, as VerlEngine did."""
    stack.send(stack.new, 1)


def buckets_of_three(stack: Stack) -> None:
    """Three names in a call."""
    stack.send(stack.new, 3)


def reversed_order(stack: Stack) -> None:
    """The last name first."""
    stack.send(dict(reversed(stack.new.items())))


def flattened(stack: Stack) -> None:
    """SGLang's flattened bucket, as verl and slime send it."""
    stack.send(stack.new, load_format="flattened_bucket")


def broadcast(stack: Stack) -> None:
    """Over a process group, as slime does between hosts."""
    server = stack.server
    group = UpdateGroup(server.post, ("127.0.0.1", server.ports.update_group_port), server.tp, "gloo")
    try:
        with stack.update():
            group.broadcast(list(stack.new.items()), flush_cache=True)
    finally:
        group.close()


def from_disk(stack: Stack) -> None:
    """The checkpoint's folder."""
    stack.load(stack.new_folder)


def from_many_files(stack: Stack) -> None:
    """The same tensors in four files, without an index."""
    stack.load(stack.save(stack.new, files=4))


def in_float32(stack: Stack) -> None:
    """The values that the checkpoint has, in float32, which the engine rounds to what they were."""
    stack.send({name: each.float() for name, each in stack.new.items()})


def twice(stack: Stack) -> None:
    """The same update again."""
    stack.send(stack.new)
    stack.send(stack.new)


def after_a_broken_one(stack: Stack) -> None:
    """An update that leaves a tensor out, and then one that brings all."""
    stale_tensor(stack)
    stack.send(stack.new)


def as_views(stack: Stack) -> None:
    """Tensors that are no contiguous memory, with their strides."""
    stack.send({name: each.mT.contiguous().mT if each.ndim > 1 else each for name, each in stack.new.items()})


def with_other_names(stack: Stack) -> None:
    """Beside the checkpoint's, what old checkpoints have and the engine skips."""
    stack.send(stack.new | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def tied_twice(stack: Stack) -> None:
    """A tied embedding under both of its names."""
    if not is_tied(stack.new_folder):
        raise DoesNotApply("the head is not tied")
    stack.send(stack.new | {HEAD: stack.new[EMBEDDING]})


def a_list_for_each_rank(stack: Stack) -> None:
    """A payload of its own for each TP rank, in another order for each."""
    orders = [list(stack.new.items()), list(reversed(stack.new.items()))]
    with stack.update():
        stack.server.send_tensors([orders[rank % 2] for rank in range(stack.server.tp)])


RIGHT: Sequence[Sender] = (
    in_one_call, name_by_name, buckets_of_three, reversed_order, flattened, broadcast, from_disk, from_many_files,
    in_float32, twice, after_a_broken_one, as_views, with_other_names, tied_twice, a_list_for_each_rank,
)  # fmt: skip


def _expert_number(named: tuple[str, Tensor]) -> int:
    found = EXPERT.search(named[0])
    return int(found[1]) if found else -1
