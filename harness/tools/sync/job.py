"""The weight sync alone: trainer, engine, and what moves between them; verified many times over, or timed.

No rollout, no optimizer, no critic: what is left is the part that stacks get wrong silently, small enough to bisect. A bench
stands beside what the links could do, an all-gather of the same bytes, and what one tensor a call costs.
"""

import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from harness.cluster.mesh import build_meshes
from harness.cluster.world import World, all_gather
from harness.config.run_folder import write_config
from harness.config.schema import TransportName
from harness.rollout import sglang_api
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.observer import RunContext
from harness.runtime.units import GIB, MIB
from harness.task.data import load_rows
from harness.tools.verification.engine_gpus import check_gpus
from harness.tools.verification.perturb import perturb
from harness.tools.verification.readback import unreadable, weight_differences
from harness.train import as_config_error, import_sglang, make_model_folder, start_engine, trainer_attention
from harness.trainer.model import load_causal_lm
from harness.weights.gather import full_tensor
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.verify import WeightsDidNotArrive


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncJob:
    """What launch/sync.py was asked for; called as a job of harness.run."""

    bench: bool
    syncs: int  # verified ones of each transport, where not bench
    transports: tuple[TransportName, ...]  # several, one after the other, in place of weights.transport
    repeats: int
    one_by_one: bool
    json: str

    def __call__(self, run: RunContext) -> str:
        """Sync with each transport; return the verdict. A collective call of all ranks."""
        world, events, folder, weights = run.world, run.events, run.folder, run.config.weights
        disable_progress_bar()
        events.say(f"imported torch and transformers; run directory {folder}")
        weights = replace(weights, verify="off") if self.bench else weights
        asked = [replace(weights, transport=name) for name in self.transports or (weights.transport,)]
        api = sglang_api.probe()
        chosen = [choose_transport(replace(run.config, weights=each), api, world.device_type) for each in asked]
        run = replace(run, config=replace(run.config, weights=replace(weights, transport=chosen[0][0])))
        if world.rank == 0:
            write_config(folder, run.config, world.device_type)
        engine, model = make_engine_and_model(run)
        dtype = getattr(torch, run.config.model.dtype)
        syncs = (WeightSync(engine, model, replace(weights, transport=name), folder, dtype) for name, _ in chosen)
        verdicts: list[str] = []
        rows: list[BenchRow] = []
        for sync, (name, reason) in zip(syncs, chosen, strict=True):
            events.observer.built("sync", sync)
            events.say(f"{sync.nbytes / 1e6:.1f} MB in {len(sync.buckets)} buckets, by {name} ({reason})")
            if self.bench:
                with events.phase("bench", waiting_for="the timed syncs"):
                    rows += [] if rows else [all_gather_row(sync, world, self.repeats)]
                    rows.append(transport_row(sync, world, self.repeats))
                    if self.one_by_one and name == chosen[-1][0]:
                        rows.append(one_by_one_row(sync, world, self.repeats))
            else:
                verdicts.append(self.verify(sync, run))
            sync.close()
        with events.phase("shutdown", waiting_for="the engine's processes to end"):
            engine.shutdown()
        if rows:
            verdicts = [self.show(rows, sync, run)]
        for verdict in verdicts[:-1]:
            events.say(verdict)
        return verdicts[-1]

    def verify(self, sync: WeightSync, run: RunContext) -> str:
        """Change every tensor, sync, read back, again and again. Raises WeightsDidNotArrive at the first difference."""
        seconds = []
        for index in range(self.syncs):
            perturb(sync.live, seed=index)
            started = time.perf_counter()
            with run.events.phase("sync", index, "all ranks to gather the weights and the engine to load them"):
                sync.push()
            seconds.append(time.perf_counter() - started)
            with run.events.phase("readback", index, "the engine's weights, to compare them"):
                found = weight_differences(sync)
            if found:
                shown = "; ".join(found[:8])
                raise WeightsDidNotArrive(f"sync {index}: {len(found)} tensors are not what was sent: {shown}")
        unread = unreadable(sync.link)
        left_out = f"; not read back: {', '.join(unread[:4])}" if unread else ""
        return (
            f"PASSED: {self.syncs} syncs of {sync.nbytes / 1e6:.1f} MB in {len(sync.layout)} tensors by"
            f" {sync.transport_name}, every tensor changed before each, every element read back and equal{left_out};"
            f" {min(seconds):.3f} to {max(seconds):.3f} s a sync"
        )

    def show(self, rows: Sequence["BenchRow"], sync: WeightSync, run: RunContext) -> str:
        """Print the table; rank 0 also writes it as JSON."""
        if run.events.console:
            run.events.console.show(as_table(rows, sync))
        if run.world.rank == 0 and self.json:
            Path(self.json).write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
        limit, own = rows[0].seconds, rows[1].seconds
        return (
            f"PASSED: {sync.nbytes / 1e9:.3f} GB in {len(sync.layout)} tensors and {len(sync.buckets)} buckets;"
            f" {rows[1].way} {own:.4f} s, {own / limit:.2f} of its all-gather ({limit:.4f} s)"
        )


def make_engine_and_model(run: RunContext) -> tuple[VerlEngine, nn.Module]:
    """Return an engine for each (tp, pp) group, and the sharded model. A collective call of all ranks."""
    config, world, events = run.config, run.world, run.events
    with as_config_error(), events.phase("inputs", waiting_for="the model's folder"):
        sglang_api.check_arguments(sglang_api.probe(), config.engine.args, {})
        rows = load_rows(config.task.source, config.task.split, config.task.rows)
        model_folder = make_model_folder(run, rows)
        attention = trainer_attention(config, model_folder, world.device_type, events.say)
    meshes = build_meshes(run.dims, world.device.type)
    import_sglang(events)
    engine = start_engine(run, meshes.engines, model_folder)
    check_gpus(world, engine, config.parallel.colocate)
    with events.phase("build_trainer", waiting_for="the sharded model"):
        model = load_causal_lm(
            str(model_folder),
            getattr(torch, config.model.master_dtype),
            world.device,
            meshes.fsdp,
            weights=config.model.weights,
            seed=config.run.seed,
            attention=attention,
            compute_dtype=getattr(torch, config.model.dtype),
        )
    dist.barrier()
    return engine, model


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One way of moving the same bytes."""

    way: str
    seconds: float
    """Median over the repetitions, of the slowest rank."""
    fastest: float
    nbytes: int
    first: float | None = None
    """Seconds of the first sync, with all that is made once."""
    copy: float | None = None
    """pull: median seconds in the schedulers, of the slowest rank."""
    extra_bytes: int | None = None
    """Of a GPU, trainer and engine together, that the syncs left taken; the most of all ranks. None on the CPU."""
    sent_bytes: int | None = None
    """pull: to other hosts, by all ranks, in one sync."""


def all_gather_row(sync: WeightSync, world: World, repeats: int) -> BenchRow:
    """Time an all-gather of the same bytes: what the links could do. A collective call of all ranks, as the next two."""
    gather = all_gather_limit(sync, world)
    return _row("all-gather", sync, [_timed(world, gather) for _ in range(repeats)])


def transport_row(sync: WeightSync, world: World, repeats: int) -> BenchRow:
    """Time the transport of a sync."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # from here on the allocator keeps what a sync has taken, so that the most of it shows
    before = _gpu_free(world)
    first, seconds, copies = _timed(world, sync.push), [], []
    for _ in range(repeats):
        seconds.append(_timed(world, sync.push))
        copies.append(max(all_gather(sync.link.seconds)))
    row = _row(sync.transport_name, sync, seconds, first=first, extra_bytes=max(all_gather(before - _gpu_free(world))))
    if world.device.type != "cuda":
        row = replace(row, extra_bytes=None)
    if sync.transport_name != "pull":
        return row
    return replace(row, copy=median(copies), sent_bytes=sum(all_gather(sync.link.sent_bytes)))


def one_by_one_row(sync: WeightSync, world: World, repeats: int) -> BenchRow:
    """Time one tensor a call, which is slow: a fifth of the repetitions."""
    seconds = [_timed(world, lambda: push_one_by_one(sync)) for _ in range(max(1, repeats // 5))]
    return _row("one tensor a call, as VerlEngine", sync, seconds)


def _row(way: str, sync: WeightSync, seconds: Sequence[float], **more: Any) -> BenchRow:
    return BenchRow(way=way, seconds=median(seconds), fastest=min(seconds), nbytes=sync.nbytes, **more)


def _gpu_free(world: World) -> int:
    """Return the free bytes of this rank's GPU, whichever process has the rest; 0 on the CPU."""
    if world.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(world.device)[0])


def all_gather_limit(sync: WeightSync, world: World) -> Callable[[], None]:
    """Return a plain all-gather of as many bytes, in pieces, into one buffer. A collective call of all ranks."""
    groups = (each.device_mesh.get_group() for each in sync.live.values() if isinstance(each, DTensor))
    group = next(groups, dist.group.WORLD)
    assert group is not None
    ranks = dist.get_world_size(group)
    piece = min(GIB if world.device.type == "cuda" else 64 * MIB, sync.nbytes) // ranks * ranks
    whole = torch.empty(piece, dtype=torch.uint8, device=world.device)
    part = torch.zeros(piece // ranks, dtype=torch.uint8, device=world.device)

    def gather() -> None:
        left = sync.nbytes
        while left > 0:
            size = min(piece, -(-left // ranks) * ranks)
            group.allgather_into_tensor_coalesced([whole[:size]], [part[: size // ranks]]).wait()
            left -= size

    gather()  # the first makes NCCL's channels
    return gather


def push_one_by_one(sync: WeightSync) -> None:
    """Gather every tensor alone, collect its handles on the head, and call the engine for it: as the VerlEngine of sglang
    and verl did. What fuses on arrival is lost by it: for its time alone.
    """
    by_live_name: dict[str, list[int]] = {}
    for index, tensor in enumerate(sync.layout):
        by_live_name.setdefault(tensor.live_name, []).append(index)
    with sync.engine.weight_update():
        for name, indices in by_live_name.items():
            whole = full_tensor(sync.live[name], sync.layout[indices[0]].dtype)
            for tensor in (sync.layout[index] for index in indices):
                named = [(tensor.name, tensor.view(whole).contiguous())]
                sync.engine.update_weights_from_tensor(named, flush_cache=False)
    sync.engine.flush_cache()


def _timed(world: World, call: Callable[[], object]) -> float:
    """Return seconds from when all ranks are ready to when the last one, its GPU included, is done; alike on every rank."""
    finish = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
    finish()
    dist.barrier()
    started = time.perf_counter()
    call()
    finish()
    return float(max(all_gather(time.perf_counter() - started)))


def as_table(rows: Sequence[BenchRow], sync: WeightSync) -> str:
    """Return the rows as a table."""
    table = Table(title=f"{sync.nbytes / 1e9:.3f} GB, {len(sync.layout)} tensors, {len(sync.buckets)} buckets")
    for heading in ("way", "seconds", "fastest", "first", "copy", "GB/s", "extra, MiB", "sent, MB"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        extra = "" if row.extra_bytes is None else f"{row.extra_bytes / MIB:.0f}"
        sent = "" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.1f}"
        rate = f"{row.nbytes / row.seconds / 1e9:.1f}"  # 10^9 bytes of checkpoint tensors
        once = ("" if seconds is None else f"{seconds:.4f}" for seconds in (row.first, row.copy))
        table.add_row(row.way, f"{row.seconds:.4f}", f"{row.fastest:.4f}", *once, rate, extra, sent)
    text = io.StringIO()
    Console(width=110, color_system=None, file=text).print(table)
    return text.getvalue().rstrip()
