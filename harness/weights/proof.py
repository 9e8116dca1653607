"""What a run may claim of its syncs, in words: the verdict's part and the report's section."""

from collections.abc import Mapping, Sequence

from harness.weights.verify import Verification

Metrics = Mapping[str, float]

LEVELS = {
    "off": "Nothing was checked; the differences were only measured.",
    "log_probs": "After every sync the engine's log-probs of its responses were compared with the trainer's.",
    "bytes": "After every sync all that the engine holds was read back and compared with the trainer's tensors bit for bit,"
    " and the engine's log-probs of its responses with the trainer's.",
    "full": "Before every sync each tensor was changed, the engine's weights were filled with garbage, and the changed weights"
    " were synced, read back bit for bit and compared with a reload from disk; then the weights themselves were synced"
    " and read back, and the engine's log-probs of its responses compared with the trainer's.",
}
STATISTICS = (
    ("mean", "mean", "mean"),
    ("worst sequence", "worst_sequence_bulk", "sequence"),
    ("worst response position", "worst_position_bulk", "position"),
)


def verdict(verification: Verification, rollouts: Sequence[Metrics]) -> str:
    """One phrase on the syncs of these rollouts; of what was not checked it claims nothing."""
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    syncs = f"{len(rollouts)} weight syncs"
    if not verification.reaches("log_probs"):
        return f'{syncs}, not verified (weights.verify = "off"): largest mean log-prob difference {largest:.1e}'
    done = {
        "log_probs": "each proven by the engine's log-probs",
        "bytes": "each read back bit for bit and proven by the engine's log-probs",
        "full": "each rehearsed on poison with changed weights, compared with a reload from disk, read back bit for bit and"
        " proven by the engine's log-probs",
    }[verification.config.weights.verify]
    return f"{syncs}, {done}: largest mean difference {largest:.1e}, allowed {verification.allowed.mean:.2g}"


def section(
    verification: Verification, rollouts: Sequence[Metrics], seconds: Mapping[str, Sequence[float]]
) -> list[str]:
    """Markdown lines: the level, the statistics and what was allowed, and what each part cost.

    seconds: durations of phases by name; the phase "sync" is the sync itself, of which verification is no part.
    """
    level, baseline, allowed = verification.config.weights.verify, verification.baseline, verification.allowed
    lines = [f'weights.verify = "{level}". {LEVELS[level]}', ""]
    if level == "full":
        how = "bit for bit" if verification.is_exact else "within the allowed mean, as the engine is not deterministic"
        lines += [f"Greedy outputs before and after the reload were equal {how}.", ""]
    if not baseline:
        lines += [f"No baseline of the log-prob difference: {verification.why_no_baseline}.", ""]
    own = baseline.metrics() if baseline else {}
    lines += [
        f"| log-prob difference, nats | baseline | largest of {len(rollouts)} syncs | allowed |",
        "|---|---|---|---|",
    ]
    for words, metric, field in STATISTICS:
        name = f"log_prob_difference_{metric}"
        before = f"{own[name]:.2g}" if own else "none"
        bound = f"{getattr(allowed, field):.2g}" if verification.reaches("log_probs") else "any"
        lines.append(f"| {words} | {before} | {max(each[name] for each in rollouts):.2g} | {bound} |")
    lines += ["", "A sequence or position is judged by its lower three quarters, see harness/weights/log_probs.py.", ""]
    return [*lines, *_costs(rollouts, seconds)]


def _costs(rollouts: Sequence[Metrics], seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A row for the sync and for each part, on rank 0."""
    parts = {"sync": list(seconds.get("sync", ()))}
    for each in rollouts:
        for name, value in each.items():
            if name.startswith("verify/"):
                parts.setdefault(name.removeprefix("verify/").removesuffix("_seconds"), []).append(value)
    rows = [
        f"| {part} | {len(values)} | {sum(values) / len(values):.3f} | {max(values):.3f} |"
        for part, values in parts.items()
        if values
    ]
    return ["| part | times | mean s | largest s |", "|---|---|---|---|", *rows]
