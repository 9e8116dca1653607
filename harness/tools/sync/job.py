"""Run weight syncs from trainer to engine, many times, and verify or time each.

The sync is the part that stacks get wrong silently. Without rollout, optimizer and critic it is small enough to bisect.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils.logging import disable_progress_bar

from harness.build import build_sync, import_sglang, start_engine
from harness.cluster.mesh import build_meshes
from harness.config.facts import Facts
from harness.config.resolve import SYNC_SECTIONS, resolve
from harness.config.run_folder import write_config
from harness.config.schema import TransportName
from harness.inputs import as_config_error, make_engine_folder, make_model_folder, trainer_attention
from harness.observer import RunContext
from harness.rollout import sglang_api
from harness.rollout.engine import RolloutEngine
from harness.rollout.sglang_api.probe import engine_facts
from harness.task.data import load_rows
from harness.tools.sync.read_back import read_back
from harness.tools.sync.time_syncs import BenchRow, all_gather_row, as_table, bytes_line, sync_row
from harness.trainer.model import load_causal_lm
from harness.weights.presync_checks import first_of
from harness.weights.pull.transport import PullTransport
from harness.weights.sync import WeightSync
from harness.weights.verification.perturb import perturb
from harness.weights.verification.refusals import refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncJob:
    """What launch/sync.py was asked for; called as a job of harness.run."""

    bench: bool = False
    syncs: int = 3
    """Verified syncs by each transport."""
    transports: tuple[TransportName, ...] = ()
    """Several transports, one after the other, instead of weights.transport."""
    repeats: int = 5
    """Timed syncs by each transport."""

    def __call__(self, run: RunContext) -> str:
        """Sync by each transport; return the verdict. A collective call of all ranks."""
        disable_progress_bar()
        run.events.say(f"imported torch and transformers; run directory {run.folder}")
        weights = replace(run.config.weights, verify=not self.bench and run.config.weights.verify)
        asked = [replace(weights, transport=name) for name in self.transports or (weights.transport,)]
        facts = Facts(device=run.world.device_type, environment=os.environ, sglang=engine_facts(sglang_api.probe()))
        resolved = [resolve(replace(run.config, weights=each), facts, SYNC_SECTIONS).config for each in asked]
        run = replace(run, config=resolved[0])
        if run.world.rank == 0:
            write_config(run.folder, run.config, run.world.device_type)
        engine, model, folder = make_engine_and_model(run)
        verdicts: list[str] = []
        rows: list[BenchRow] = []
        for config in resolved:
            name, sync = config.weights.transport, build_sync(replace(run, config=config), engine, model, folder)
            run.observer.built("sync", sync)
            run.events.say(f"{sync.weights.nbytes / 1e6:.1f} MB in {len(sync.weights.layout)} tensors, by {name}")
            if self.bench:
                with run.events.phase("bench", waiting_for="the timed syncs"):
                    rows = rows or [all_gather_row(sync.weights, run.world, self.repeats)]
                    rows.append(sync_row(name, sync, run.world, self.repeats))
                    if isinstance(sync.transport, PullTransport):
                        run.events.say(bytes_line(sync.transport, run.world))
            else:
                verdicts.append(self.verify(run, name, sync))
            sync.close()
        with run.events.phase("shutdown", waiting_for="the engine's processes to end"):
            engine.shutdown()
        if self.bench:
            return self.show(run, rows, sync)
        for verdict in verdicts[:-1]:
            run.events.say(verdict)
        return verdicts[-1]

    def verify(self, run: RunContext, name: str, sync: WeightSync) -> str:
        """Change every tensor, sync, read back, again and again. Raise WeightsDidNotArrive at the first difference."""
        for index in range(self.syncs):
            perturb(sync.sent.held_tensors(), seed=index)
            with run.events.in_step(index):
                with run.events.phase("sync", "the weights of all ranks to reach the engine"):
                    sync.update_engine()
                with run.events.phase("readback", "the engine's weights, to compare them"):
                    found = read_back(sync.weights, sync.loader)
            wrong = found.differences
            refuse(wrong, f"sync {index}: {len(wrong)} tensors are not what was sent")
        seconds = run.events.seconds["sync"][-self.syncs :]
        not_covered = [*found.not_covered, *sync.unfilled]
        left_out = f"; NOT compared: {first_of(not_covered)}" if not_covered else ""
        return (
            f"PASSED: {self.syncs} syncs of {sync.weights.nbytes / 1e6:.1f} MB in {len(sync.weights.layout)} tensors by"
            f" {name}, every tensor changed before each, every element read back and equal{left_out};"
            f" {min(seconds):.3f} to {max(seconds):.3f} s a sync"
        )

    def show(self, run: RunContext, rows: list[BenchRow], sync: WeightSync) -> str:
        """Show the table and return the verdict."""
        if run.events.console:
            run.events.console.show(as_table(rows, sync.weights))
        limit, own = rows[0].seconds, rows[1].seconds
        return (
            f"PASSED: {sync.weights.nbytes / 1e9:.3f} GB in {len(sync.weights.layout)} tensors; {rows[1].way} {own:.4f} s,"
            f" {own / limit:.2f} times its all-gather ({limit:.4f} s)"
        )


def make_engine_and_model(run: RunContext) -> tuple[RolloutEngine, nn.Module, Path]:
    """Return an engine for each (tp, pp) group, the sharded model, and the model's folder.

    A collective call of all ranks.
    """
    config, world, events = run.config, run.world, run.events
    with as_config_error(), events.phase("inputs", waiting_for="the model's folder"):
        rows = load_rows(config.task.source, config.task.split, config.task.rows)
        model_folder = make_model_folder(run, rows)
        attention = trainer_attention(config, model_folder, world.device_type, events.say)
    meshes = build_meshes(run.dims, world.device.type)
    import_sglang(run)
    engine = start_engine(run, meshes.engines, make_engine_folder(run, model_folder))
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
    return engine, model, model_folder
