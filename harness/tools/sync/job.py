"""The weight sync alone: trainer, engine, and what moves between them; verified many times over, or timed.

No rollout, no optimizer, no critic: what is left is the part that stacks get wrong silently, small enough to bisect.
"""

import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.utils.logging import disable_progress_bar

from harness.cluster.mesh import build_meshes
from harness.cluster.world import World
from harness.config.run_folder import write_config
from harness.config.schema import TransportName
from harness.rollout import sglang_api
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.events import EventLog
from harness.runtime.observer import RunContext
from harness.runtime.units import MIB
from harness.task.data import load_rows
from harness.tools.sync.bench import BenchRow, bench
from harness.train import as_config_error, import_sglang, make_model_folder, start_engine, trainer_attention
from harness.trainer.model import load_causal_lm
from harness.weights.perturb import perturb
from harness.weights.readback import unreadable, weight_differences
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.verify import WeightsDidNotArrive


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncJob:
    """What launch/sync.py was asked for; called as a job of harness.run."""

    bench: bool
    syncs: int
    """Verified syncs of each transport, where not bench."""
    transports: tuple[TransportName, ...]
    """Several, one after the other, in place of weights.transport."""
    repeats: int
    one_by_one: bool
    json: str

    def __call__(self, run: RunContext) -> str:
        """Sync with each transport; return the verdict. A collective call of all ranks."""
        config, world, events, folder = run.config, run.world, run.events, run.folder
        disable_progress_bar()
        events.say(f"imported torch and transformers; run directory {folder}")
        if self.bench:
            config = replace(config, weights=replace(config.weights, verify="off"))
            run = replace(run, config=config)
        api = sglang_api.probe()
        asked = self.transports or (config.weights.transport,)
        configs = [replace(config, weights=replace(config.weights, transport=name)) for name in asked]
        chosen = [choose_transport(each, api, world.device_type) for each in configs]
        config = replace(config, weights=replace(config.weights, transport=chosen[0][0]))
        run = replace(run, config=config)
        if world.rank == 0:
            write_config(folder, config, world.device_type)
        engine, model = make_engine_and_model(run, [name for name, _ in chosen])
        verdicts = []
        for name, reason in chosen:
            weights = replace(config.weights, transport=name)
            sync = WeightSync(engine, model, weights, folder, getattr(torch, config.model.dtype))
            events.observer.built("sync", sync)
            events.say(f"{sync.nbytes / 1e6:.1f} MB in {len(sync.buckets)} buckets, by {name} ({reason})")
            verdicts.append(self.time(sync, world, events) if self.bench else self.verify(sync, world, events))
            sync.close()
        with events.phase("shutdown", waiting_for="the engine's processes to end"):
            engine.shutdown()
        for verdict in verdicts[:-1]:
            events.say(verdict)
        return verdicts[-1]

    def verify(self, sync: WeightSync, world: World, events: EventLog) -> str:
        """Change every tensor, sync, read back, again and again. Raises WeightsDidNotArrive at the first difference."""
        seconds = []
        for index in range(self.syncs):
            perturb(sync.live, seed=index)
            started = time.perf_counter()
            with events.phase("sync", index, "all ranks to gather the weights and the engine to load them"):
                sync.push()
            seconds.append(time.perf_counter() - started)
            with events.phase("readback", index, "the engine's weights, to compare them"):
                found = weight_differences(sync)
            if found:
                raise WeightsDidNotArrive(
                    f"sync {index}: {len(found)} tensors are not what was sent: {'; '.join(found[:8])}"
                )
        unread = unreadable(sync.link())
        left_out = f"; not read back: {', '.join(unread[:4])}" if unread else ""
        return (
            f"PASSED: {self.syncs} syncs of {sync.nbytes / 1e6:.1f} MB in {len(sync.layout)} tensors by"
            f" {sync.transport_name}, every tensor changed before each, every element read back and equal{left_out};"
            f" {min(seconds):.3f} to {max(seconds):.3f} s a sync"
        )

    def time(self, sync: WeightSync, world: World, events: EventLog) -> str:
        """Print the table; rank 0 also writes it as JSON."""
        with events.phase("bench", waiting_for="the timed syncs"):
            rows = bench(sync, world, self.repeats, self.one_by_one)
        if events.console:
            events.console.show(as_table(rows, sync))
        if world.rank == 0 and self.json:
            Path(self.json).write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
        ratio = rows[1].seconds / rows[0].seconds
        return (
            f"PASSED: {sync.nbytes / 1e9:.3f} GB in {len(sync.layout)} tensors and {len(sync.buckets)} buckets;"
            f" {sync.transport_name} {rows[1].seconds:.4f} s, {ratio:.1f} times its all-gather ({rows[0].seconds:.4f} s)"
        )


def make_engine_and_model(run: RunContext, transports: Sequence[TransportName]) -> tuple[VerlEngine, nn.Module]:
    """Return an engine for each (tp, pp) group, and the sharded model. A collective call of all ranks."""
    config, world, events = run.config, run.world, run.events
    with as_config_error(), events.phase("inputs", waiting_for="the model's folder"):
        sglang_api.check_arguments(sglang_api.probe(), config.engine.args, {})
        rows = load_rows(config.task.source, config.task.split, config.task.rows)
        model_folder = make_model_folder(run, rows)
        attention = trainer_attention(config, model_folder, world.device_type, events.say)
    meshes = build_meshes(run.dims, world.device.type)
    import_sglang(run, transports)
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


def as_table(rows: list[BenchRow], sync: WeightSync) -> str:
    """Return the rows as a table, then what the configured transport's time went into."""
    table = Table(title=f"{sync.nbytes / 1e9:.3f} GB, {len(sync.layout)} tensors, {len(sync.buckets)} buckets")
    for heading in ("way", "seconds", "fastest", "GB/s", "extra memory, MiB"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        extra = "" if row.peak_extra_bytes is None else f"{row.peak_extra_bytes / MIB:.0f}"
        figures = [f"{row.seconds:.4f}", f"{row.fastest:.4f}", f"{row.gigabytes_per_second:.1f}", extra]
        table.add_row(row.way, *figures)
    text = io.StringIO()
    Console(width=100, color_system=None, file=text).print(table)
    lines = [text.getvalue().rstrip()]
    for name, seconds in breakdown(rows[1]).items():
        lines.append(f"  {name:<44} {seconds:.4f} s")
    return "\n".join(lines)


def breakdown(row: BenchRow) -> dict[str, float]:
    """Return what a stream's seconds went into; the parts between hand-over and the end run side by side."""
    parts = row.parts
    if not parts:
        return {}
    return {
        "hand-over (the engine's call around the loads)": max(0.0, row.seconds - parts["feed"]),
        "gather (all-gathers, trainer side)": parts["fill"],
        "load (copies, scheduler side)": parts["scheduler_load"],
        "wait (trainer, for a slot to be read)": parts["wait"],
        "wait (scheduler, for a slot to be filled)": parts["scheduler_wait"],
    }
