"""The names of all phases, for run.phase_timeouts, run.inject, and `--cut` and `--kill` of emulated hosts."""

MEET = "meet"
"""Until the ranks have met and have compared config, environment and locations."""
RUN = "run"
"""The whole job; all other phases are inside it."""

_START = (
    "inputs", "quantize_model", "import_sglang", "start_engine", "first_release", "build_trainer", "load_baseline",
    "load_checkpoint",
)  # fmt: skip
_STEP = (
    "resume_weights", "sync", "resume_kv_cache", "generate", "validate", "release", "old_log_probs", "reference_log_probs", "values",
    "advantages", "update_critic", "update_actor", "free_caches",
)  # fmt: skip
_VERIFY = (
    "baseline", "perturb", "push", "generate", "changed_log_probs", "poison", "fingerprints", "first_sync", "copies", "held",
    "log_probs",
)  # fmt: skip
_SYNC_JOB = ("readback", "bench")
_MISMATCH_JOB = ("engine_scores", "trainer_scores", "routers", "record", "save_weights")

STEP_PHASES = (*_STEP, *(f"verify_{part}" for part in _VERIFY))
"""Phases that belong to a step."""

PHASES = (
    *(MEET, RUN, *_START, *_STEP, *(f"verify_{part}" for part in _VERIFY)),
    *("save_checkpoint", *_SYNC_JOB, *_MISMATCH_JOB, "shutdown"),
)


def phase_of_step(phase: str, step: int | None) -> str:
    """Return "sync of step 1"; the name alone for a phase that belongs to no step."""
    return phase if step is None else f"{phase} of step {step}"
