"""A run directory of any number of ranks with fake but plausible events: nothing in it was measured.

For tests of reports.

python -m tests.tools.report.fake_run FOLDER [RANKS] [passed]
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from harness.config.layers import to_toml
from harness.config.schema import ActorConfig, Config, Engine, Model, Parallel, Rollout, Run

STARTED = 1_795_000_000.0
GIB = 1 << 30
START = {"inputs": 2.0, "import_sglang": 9.0, "start_engine": 31.0, "first_release": 1.5, "build_trainer": 6.0}
STEP = {
    "resume_weights": 0.6, "sync": 1.9, "resume_kv_cache": 0.4, "generate": 3.2, "release": 0.7, "old_log_probs": 0.8,
    "reference_log_probs": 0.7, "values": 0.5, "advantages": 0.05, "update_critic": 1.6, "update_actor": 1.8,
    "free_caches": 0.1,
}  # fmt: skip
ENGINE_AWAKE = {"resume_weights": 16, "sync": 16, "resume_kv_cache": 62, "generate": 64}
"""GiB of the engine at the end of a phase; 3 at others."""
HANGS_AT = ("sync", 2)


def fake_run(folder: Path, ranks: int = 64, passed: bool = False, steps: int = 4, per_host: int = 8) -> Path:
    """Ranks on hosts of 8 GPUs; where not passed, the last rank but 3 hangs in sync of step 2, and the others wait for
    it."""
    chance = random.Random(0)
    tp = min(8, ranks)
    config = Config(
        run=Run(steps=steps, phase_timeouts={"sync": 30.0}),
        parallel=Parallel(dp=ranks // tp, tp=tp),
        model=Model(name="qwen3_moe", dtype="bfloat16"),
        engine=Engine(device="cuda"),
        rollout=Rollout(prompts_per_step=2 * ranks),
        actor=ActorConfig(minibatch_size=ranks, microbatch_size=1),
    )
    (folder / "events").mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    hung = max(0, ranks - 4)
    (folder / "environment.json").write_text(json.dumps([facts(rank, per_host) for rank in range(ranks)]))
    for rank in range(ranks):
        events = events_of(rank, per_host, steps, chance, None if passed else rank == hung)
        lines = "".join(json.dumps(each) + "\n" for each in events)
        (folder / "events" / f"rank{rank}.jsonl").write_text(lines)
    metrics = [metrics_of(step, chance, ranks) for step in range(steps if passed else HANGS_AT[1])]
    if passed:
        metrics.append({"kind": "final_check", "final/step": steps, "final/log_prob_difference_mean": 0.003})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    if not passed:
        (folder / "failure-host0.json").write_text(json.dumps(verdict(ranks, hung, per_host)))
    return folder


def facts(rank: int, per_host: int) -> dict[str, Any]:
    host = rank // per_host
    environment = {"NCCL_DEBUG": "WARN", "NCCL_CUMEM_ENABLE": "1" if host == 3 else "0"}
    versions = {"python": "3.11.7", "torch": "2.9.1+cu128", "sglang": "0.5.20", "transformers": "5.12.1"}
    return {
        "rank": rank, "host": f"host{host}/fake{host}/net:[1]", "device": "NVIDIA H200", "platform": "Linux-fake",
        "versions": versions, "environment": environment,
    }  # fmt: skip


def events_of(rank: int, per_host: int, steps: int, chance: random.Random, hangs: bool | None) -> list[dict[str, Any]]:
    """hangs: whether this rank does at HANGS_AT, or waits for the one that does; None: the run passes."""
    now, found = STARTED + chance.random() * 0.3, []
    shared = STARTED + 0.3
    """When the slowest rank is through: all others wait for it."""
    common = {"rank": rank, "host": f"host{rank // per_host}/fake/net:[1]"}

    def add(event: str, **values: Any) -> None:
        found.append({"time": now} | common | {"event": event} | values)

    add("phase_start", phase="run", step=None)
    for phase, seconds in START.items():
        add("phase_start", phase=phase, step=None)
        now = shared + seconds * chance.uniform(0.9, 1.0)
        shared += seconds
        add("phase_end", phase=phase, step=None, seconds=seconds, memory=figures(phase, chance))
    if rank == 0:
        add("engine", version="0.5.20", device="cuda", preset="sglang", arguments={"tp_size": 8})
    add("log_prob_baseline", log_prob_difference_mean=0.0031, allowed=0.026)
    for step in range(steps):
        for phase, seconds in STEP.items():
            add("phase_start", phase=phase, step=step)
            if hangs is not None and (phase, step) == HANGS_AT:
                return found
            now = shared + seconds * chance.uniform(0.97, 1.0)
            shared += seconds
            add("phase_end", phase=phase, step=step, seconds=seconds, memory=figures(phase, chance))
            if phase == "old_log_probs":
                mean = chance.uniform(0.0026, 0.004)
                add("log_prob_difference", step=step, log_prob_difference_mean=mean, log_prob_difference_max=mean * 40)
            if hangs and phase == "update_critic" and step == HANGS_AT[1] - 1:
                return found  # it never comes to the sync
    add("phase_end", phase="run", step=None, seconds=0, memory={})
    if rank == 0:
        add("verification", lines=["every tensor by fingerprint (fake)"])
        add("say", text=f"PASSED: {steps} PPO steps; report fake")
    return found


def figures(phase: str, chance: random.Random) -> dict[str, int]:
    used = int(GIB * chance.uniform(20, 22) * (1.4 if phase.startswith("update") else 1))
    engine = int(GIB * (ENGINE_AWAKE.get(phase, 3) + chance.random()))
    reserved, total = used + int(2 * GIB), 140 * GIB
    return {
        "rss": 9 * GIB, "used": used, "reserved": reserved, "peak": reserved, "before": used, "engine": engine,
        "free": total - reserved - engine, "total": total,
    }  # fmt: skip


def metrics_of(step: int, chance: random.Random, ranks: int) -> dict[str, Any]:
    memory = {
        phase: {name: [figures(phase, chance)[name] >> 20 for _ in range(ranks)] for name in ("used", "reserved", "engine", "free")}
        for phase in ("sync", "update_actor")
    }  # fmt: skip
    return {
        "step": step, "reward_mean": 0.2 + 0.1 * step, "truncated_share": 0.5, "log_prob_difference_mean": chance.uniform(0.0026, 0.004),
        "actor/loss": chance.uniform(-0.1, 0.1), "actor/grad_norm": chance.uniform(0.3, 0.9), "actor/entropy": 4.5,
        "seconds": 12.0 + chance.random(), "memory/ranks_mib": memory, "memory/end": 60 * GIB,
        **({"startup/engine": 31.0, "startup/first_token": 50.0} if step == 0 else {}),
    }  # fmt: skip


def verdict(ranks: int, hung: int, per_host: int) -> dict[str, Any]:
    host = hung // per_host
    said = (
        f"FIRST FAILURE: deadline of 30 s passed in sync of step 2: rank {hung} on host{host} had not arrived, but was after"
        " update_critic of step 1 (fake)"
    )
    first = {
        "kind": "deadline", "time": STARTED + 106, "host": "host0", "ranks": list(range(min(ranks, per_host))),
        "phase": "sync", "step": 2, "inside": True, "error": "", "seconds": 30.0, "code": 124,
    }  # fmt: skip
    return {"host": "host0", "code": 124, "said": [said], "first": first, "failures": [first], "places": {}}


if __name__ == "__main__":
    fake_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64, sys.argv[3:] == ["passed"])
