"""The section of a run's report on its verified syncs."""

from collections.abc import Mapping, Sequence

from harness.tools.verification.rehearsal import is_exact
from harness.tools.verification.verification_summary import Metrics, what_is_known
from harness.weights.verify import Verification

CHECKED = {
    "off": "Nothing was checked; the differences were only measured.",
    "log_probs": "After every sync 64-bit fingerprints of every element that the engine holds, and the log-probs of its"
    " responses, were compared with the trainer's. What it derives from weights is compared at level bytes.",
    "bytes": "After every sync all that the engine holds was read back and compared with the trainer's tensors bit for bit,"
    " and the log-probs of its responses with the trainer's.",
    "full": "Before every sync each tensor was changed, synced onto garbage, read back bit for bit and compared with a"
    " reload from disk; after it all was read back, and the log-probs of the engine's responses compared.",
}
STATISTICS = (
    ("mean", "mean", "mean"),
    ("worst sequence", "worst_sequence_bulk", "sequence"),
    ("worst response position", "worst_position_bulk", "position"),
)


def report_section(
    verification: Verification, rollouts: Sequence[Metrics], seconds: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return Markdown lines: the level, the statistics and what was allowed, and what each part cost.

    seconds: durations of phases by name; the phase "sync" is the sync itself, of which verification is no part.
    """
    level, baseline, allowed = verification.config.weights.verify, verification.baseline, verification.allowed
    lines = [f'weights.verify = "{level}". {CHECKED[level]}', ""]
    if level == "full":
        how = "bit for bit" if is_exact(verification) else "within the allowed mean, as the engine is not deterministic"
        lines += [f"Greedy outputs before and after the reload were equal {how}.", ""]
    if not baseline:
        lines += [f"No baseline of the log-prob difference: {verification.why_no_baseline}.", ""]
    if level != "off":
        lines += [*(f"- {phrase}" for phrase in what_is_known(rollouts)), ""]
    lines += [
        f"| log-prob difference, nats | baseline | largest of {len(rollouts)} syncs | allowed |",
        "|---|---|---|---|",
    ]
    own = baseline.metrics() if baseline else {}
    for words, metric, field in STATISTICS:
        name = f"log_prob_difference_{metric}"
        before = f"{own[name]:.2g}" if own else "none"
        bound = "any" if level == "off" else f"{getattr(allowed, field):.2g}"
        lines.append(f"| {words} | {before} | {max(each[name] for each in rollouts):.2g} | {bound} |")
    lines += ["", "A sequence or position is judged by its lower three quarters, see harness/weights/log_probs.py.", ""]
    lines += ["| part | times | mean s | largest s |", "|---|---|---|---|"]
    parts = {name: seconds[name] for name in ("sync", "verify_baseline") if name in seconds}
    names = dict.fromkeys(name for each in rollouts for name in each if name.startswith("seconds/verify_"))
    parts |= {name.partition("/")[2]: [each[name] for each in rollouts if name in each] for name in names}
    return lines + [
        f"| {part.removeprefix('verify_')} | {len(each)} | {sum(each) / len(each):.3f} | {max(each):.3f} |"
        for part, each in parts.items()
    ]
