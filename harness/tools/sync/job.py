"""The weight sync alone: trainer, engine, and what moves between them; verified many times over, or timed.

No rollout, no optimizer, no critic: what is left is the part that stacks get wrong silently, small enough to bisect. A bench
stands beside what the links could do, an all-gather of the same bytes, and what one tensor a call costs.
"""

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

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
from harness.train import as_config_error, import_sglang, make_model_folder, start_engine, trainer_attention
from harness.trainer.model import load_causal_lm
from harness.weights.gather import full_tensor
from harness.weights.perturb import perturb
from harness.weights.readback import unreadable, weight_differences
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.verify import WeightsDidNotArrive

PARTS = {
    "fill": "gather (all-gathers, trainer side)",
    "scheduler_load": "load (copies, scheduler side)",
    "wait": "wait (trainer, for a slot to be read)",
    "scheduler_wait": "wait (scheduler, for a slot to be filled)",
}
"""What a stream's seconds went into, by names of WeightLink.seconds."""


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
        verdicts = []
        for name, reason in chosen:
            dtype = getattr(torch, run.config.model.dtype)
            sync = WeightSync(engine, model, replace(weights, transport=name), folder, dtype)
            events.observer.built("sync", sync)
            events.say(f"{sync.nbytes / 1e6:.1f} MB in {len(sync.buckets)} buckets, by {name} ({reason})")
            verdicts.append(self.time(sync, run) if self.bench else self.verify(sync, run))
            sync.close()
        with events.phase("shutdown", waiting_for="the engine's processes to end"):
            engine.shutdown()
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
        unread = unreadable(sync.link())
        left_out = f"; not read back: {', '.join(unread[:4])}" if unread else ""
        return (
            f"PASSED: {self.syncs} syncs of {sync.nbytes / 1e6:.1f} MB in {len(sync.layout)} tensors by"
            f" {sync.transport_name}, every tensor changed before each, every element read back and equal{left_out};"
            f" {min(seconds):.3f} to {max(seconds):.3f} s a sync"
        )

    def time(self, sync: WeightSync, run: RunContext) -> str:
        """Print the table; rank 0 also writes it as JSON."""
        with run.events.phase("bench", waiting_for="the timed syncs"):
            rows = bench(sync, run.world, self.repeats, self.one_by_one)
        if run.events.console:
            run.events.console.show(as_table(rows, sync))
        if run.world.rank == 0 and self.json:
            Path(self.json).write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
        limit, own = rows[0].seconds, rows[1].seconds
        return (
            f"PASSED: {sync.nbytes / 1e9:.3f} GB in {len(sync.layout)} tensors and {len(sync.buckets)} buckets;"
            f" {sync.transport_name} {own:.4f} s, {own / limit:.1f} times its all-gather ({limit:.4f} s)"
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


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One way of moving the same bytes."""

    way: str
    seconds: float  # median over the repetitions, of the slowest rank
    fastest: float
    nbytes: int
    parts: Mapping[str, float]  # seconds of the median repetition, on the rank where it was longest; parts overlap
    peak_extra_bytes: int | None  # most that a trainer's process held beyond what it held before; None on the CPU


def bench(sync: WeightSync, world: World, repeats: int, one_by_one: bool) -> list[BenchRow]:
    """Time the limit, the configured transport and, where asked, one tensor a call; a collective call of all ranks."""
    gather = all_gather_limit(sync, world)
    rows = [_row("all-gather of the same bytes", sync, [_timed(world, gather) for _ in range(repeats)])]
    sync.push()  # opens the slots and makes plans
    on_cuda, before = world.device.type == "cuda", 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
        slots = sync.link().link.slots if sync.transport_name == "stream" else ()  # there when a later sync begins
        before = torch.cuda.memory_allocated(world.device) - sum(slot.numel() for slot in slots)
    runs = [(_timed(world, sync.push), sync.parts()) for _ in range(repeats)]
    peak = max(all_gather(torch.cuda.max_memory_allocated(world.device) - before)) if on_cuda else None
    seconds = [each for each, _ in runs]
    chosen = min(range(repeats), key=lambda index: abs(seconds[index] - median(seconds)))
    parts = all_gather(runs[chosen][1])
    longest = {name: max(each.get(name, 0.0) for each in parts) for name in parts[0]}
    rows.append(_row(f"transport {sync.transport_name}", sync, seconds, longest, peak))
    if one_by_one:
        seconds = [_timed(world, lambda: push_one_by_one(sync)) for _ in range(max(1, repeats // 5))]
        rows.append(_row("one tensor a call, as VerlEngine", sync, seconds))
    return rows


def _row(
    way: str,
    sync: WeightSync,
    seconds: Sequence[float],
    parts: Mapping[str, float] | None = None,
    peak: int | None = None,
) -> BenchRow:
    return BenchRow(way, median(seconds), min(seconds), sync.nbytes, parts or {}, peak)


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
    """Return the rows as a table, then what the configured transport's time went into."""
    table = Table(title=f"{sync.nbytes / 1e9:.3f} GB, {len(sync.layout)} tensors, {len(sync.buckets)} buckets")
    for heading in ("way", "seconds", "fastest", "GB/s", "extra memory, MiB"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        extra = "" if row.peak_extra_bytes is None else f"{row.peak_extra_bytes / MIB:.0f}"
        rate = f"{row.nbytes / row.seconds / 1e9:.1f}"  # 10^9 bytes of checkpoint tensors: what each rank has gathered
        table.add_row(row.way, f"{row.seconds:.4f}", f"{row.fastest:.4f}", rate, extra)
    text = io.StringIO()
    Console(width=100, color_system=None, file=text).print(table)
    parts = [f"  {name:<44} {seconds:.4f} s" for name, seconds in breakdown(rows[1]).items()]
    return "\n".join([text.getvalue().rstrip(), *parts])


def breakdown(row: BenchRow) -> dict[str, float]:
    """Return what a stream's seconds went into; the parts between hand-over and the end run side by side."""
    if not row.parts:
        return {}
    call = max(0.0, row.seconds - row.parts["feed"])
    parts = {label: row.parts[name] for name, label in PARTS.items()}
    return {"hand-over (the engine's call around the loads)": call} | parts
