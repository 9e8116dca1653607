"""Summary of a run's verified syncs: the phrase of its verdict and the section of its report."""

from collections.abc import Mapping, Sequence

from harness.weights.verify import Verification

Metrics = Mapping[str, float]

CHECKED = {
    "off": "Nothing was checked; the differences were only measured.",
    "log_probs": "After every sync 64-bit fingerprints of every element that the engine holds, and the log-probs of its"
    " responses, were compared with the trainer's. What it derives from weights is compared at level bytes.",
    "bytes": "After every sync all that the engine holds was read back and compared with the trainer's tensors bit for bit,"
    " and the log-probs of its responses with the trainer's.",
    "full": "Before every sync each tensor was changed, synced onto garbage, read back bit for bit and compared with a"
    " reload from disk; after it all was read back, and the log-probs of the engine's responses compared.",
}
CHECKED_SHORT = {
    "bytes": ["each read back bit for bit"],
    "full": ["each rehearsed on garbage with changed weights, compared with a reload from disk, read back bit for bit"],
}
STATISTICS = (
    ("mean", "mean", "mean"),
    ("worst sequence", "worst_sequence_bulk", "sequence"),
    ("worst response position", "worst_position_bulk", "position"),
)


def verdict_phrase(verification: Verification, rollouts: Sequence[Metrics]) -> str:
    """Return one phrase on the syncs of these rollouts; it claims nothing of what was not checked."""
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    syncs, level = f"{len(rollouts)} weight syncs", verification.config.weights.verify
    if level == "off":
        return f'{syncs}, not verified (weights.verify = "off"): largest mean log-prob difference {largest:.1e}'
    phrases = "; ".join([*CHECKED_SHORT.get(level, ()), *_what_is_known(rollouts)])
    return f"{syncs}: {phrases}; largest mean difference {largest:.1e}, allowed {verification.allowed.mean:.2g}"


def _what_is_known(rollouts: Sequence[Metrics]) -> list[str]:
    """Return a phrase for each thing that the syncs are known to have done, from Verification.sync_metrics."""
    # A sync that did nothing passes the log-prob check unless the update before it moved log-probs by more than is allowed.
    unproven = [each for each in rollouts if not each.get("sync_proven_by_log_probs")]
    compared = int(min(each.get("sync_tensors_compared", 0) for each in rollouts))
    tensors = int(max(each.get("sync_tensors", 0) for each in rollouts))
    found = []
    if compared:
        whole = f"all {tensors}" if compared == tensors else f"{compared} of {tensors}"
        found.append(f"after each, {whole} tensors in the engine equal the trainer's by fingerprint")
    if not unproven:
        return [*found, "the engine's log-probs prove each"]
    moved = max(each.get("sync_movement", 0.0) for each in unproven)
    found.append(
        f"the engine's log-probs prove {len(rollouts) - len(unproven)} of {len(rollouts)} (for {len(unproven)} the update"
        f" moved log-probs by at most {moved:.1e}, which a stale engine passes)"
    )
    if not compared:
        found.append("nothing shows the others, as this sglang has no custom weight loaders (0.4.8)")
    return found


def report_section(
    verification: Verification, rollouts: Sequence[Metrics], seconds: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return Markdown lines: the level, the statistics and what was allowed, and what each part cost.

    seconds: durations of phases by name; the phase "sync" is the sync itself, of which verification is no part.
    """
    level, baseline, allowed = verification.config.weights.verify, verification.baseline, verification.allowed
    lines = [f'weights.verify = "{level}". {CHECKED[level]}', ""]
    if level == "full":
        how = "bit for bit" if verification.is_exact else "within the allowed mean, as the engine is not deterministic"
        lines += [f"Greedy outputs before and after the reload were equal {how}.", ""]
    if not baseline:
        lines += [f"No baseline of the log-prob difference: {verification.why_no_baseline}.", ""]
    if level != "off":
        lines += [*(f"- {phrase}" for phrase in _what_is_known(rollouts)), ""]
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
