"""What a run may claim of its syncs: the verdict's phrase, and the section of the report."""

from collections.abc import Mapping, Sequence

from harness.config.precision import Precision
from harness.weights.log_probs import FACTOR, Allowed, LogProbDifference

Metrics = Mapping[str, float]
"""Of one rollout, with SyncRecord.metrics of the sync before it."""
STATISTICS = (
    ("mean", "mean", "mean"),
    ("mean of the three quarters that differ least", "bulk", "bulk"),
    ("worst sequence", "worst_sequence_bulk", "sequence"),
    ("worst response position", "worst_position_bulk", "position"),
)
"""(words, metric, field of Allowed)."""


def verdict_phrase(
    verify: bool,
    can_ask: bool,
    rollouts: Sequence[Metrics],
    allowed: Allowed,
    before_steps: Sequence[str],
    not_covered: Sequence[str] = (),
    mismatch: str = "",
) -> str:
    """Return one phrase on the syncs before these rollouts; it claims nothing that was not checked.

    before_steps: phrases on what was shown once. not_covered: a sentence for each of what no check covers.
    mismatch: from mismatch_of_precisions.
    """
    differ = mismatch or f"largest mean log-prob difference {_largest(rollouts):.1e}"
    syncs = f"{len(rollouts)} weight sync" + "s" * (len(rollouts) > 1)
    if not verify:
        return f"{syncs}, not verified (weights.verify = false): {differ}"
    syncs += " onto poison" * _each(rollouts, "poisoned")
    compared = what_was_compared(can_ask, rollouts, not_covered)
    shown = "; ".join([*before_steps, compared])
    return f"{syncs}: {shown}; {differ}, allowed {allowed}; log-probs do not show an update that moves them less"


def mismatch_of_precisions(
    precision: Precision, rollouts: Sequence[Metrics], baseline: LogProbDifference | None
) -> str:
    """Return a phrase on how far a quantized engine is from the trainer; "" if both compute with the same numbers."""
    if not precision.is_quantized:
        return ""
    engine, dtype = precision.of_engine, precision.computed
    first = f"{baseline.mean:.1e} on its own first load" if baseline else "not measured on a load of its own"
    return f"the {engine} engine and the {dtype} trainer differ by up to {_largest(rollouts):.1e} in the mean ({first})"


def _largest(rollouts: Sequence[Metrics]) -> float:
    return max(each["log_prob_difference_mean"] for each in rollouts)


def what_was_compared(can_ask: bool, rollouts: Sequence[Metrics], not_covered: Sequence[str] = ()) -> str:
    """Return a phrase on what was compared after each sync, or on what it means that nothing could be."""
    if not can_ask:
        return (
            "fingerprints were not possible, as this engine cannot be asked what it holds; log-probs alone do not show a"
            " failed sync if the update moves them by less than is allowed"
        )
    compared, derived = _fewest(rollouts, "compared"), _fewest(rollouts, "derived")
    tensors = int(max(each.get("sync_tensors", 0) for each in rollouts))
    whole = f"all {tensors}" if compared == tensors else f"{compared} of {tensors}"
    again = ", and again after its rollout," if _each(rollouts, "held") else ","
    phrases = [f"after each{again} {whole} tensors in the engine equal the trainer's by fingerprint"]
    if compared < tensors and not not_covered:
        phrases.append(f"the other {tensors - compared} left what the engine's loader computes of them")
    if derived:
        phrases.append(f"{derived} tensors that the engine derives are up to date")
    if not_covered:
        phrases.append(f"NOT compared: {'; '.join(not_covered)}")
    return ", ".join(phrases)


def _fewest(rollouts: Sequence[Metrics], what: str) -> int:
    return int(min(each.get(f"sync_tensors_{what}", 0) for each in rollouts))


def _each(rollouts: Sequence[Metrics], what: str) -> bool:
    """Whether this was done at every sync."""
    return _fewest(rollouts, what) > 0


def report_section(
    *,
    verify: bool,
    can_ask: bool,
    rollouts: Sequence[Metrics],
    baseline: LogProbDifference | None,
    why_no_baseline: str,
    allowed: Allowed,
    rehearsed: bool,
    not_covered: Sequence[str] = (),
    mismatch: str = "",
    seconds: Mapping[str, Sequence[float]],
) -> list[str]:
    """Return the report's section in Markdown: what was checked, the statistics and what was allowed, and what each
    part cost.

    mismatch: from mismatch_of_precisions.
    seconds: durations of phases by name; the phase "sync" is the sync itself, without its verification.
    """
    lines = [what_was_done(verify, can_ask, rollouts, rehearsed), ""]
    if not baseline:
        lines += [f"No baseline of the log-prob difference, as {why_no_baseline}.", ""]
    if verify:
        lines += [f"- {what_was_compared(can_ask, rollouts, not_covered)}", ""]
    if mismatch:
        why = "That is what the precision costs, so log-probs show only gross failures here; fingerprints show arrival."
        lines += [f"{mismatch[0].upper()}{mismatch[1:]}. {why}", ""]
    if allowed.rounding and verify:
        loses = (
            f"The trainer's log-probs in half precision are {allowed.rounding:.1e} from its own in float32, in the mean"
        )
        lines += [f"{loses}. Up to {FACTOR:g} times that passes, see harness/weights/log_probs.py.", ""]
    lines += [
        f"| log-prob difference, nats | baseline | largest of {len(rollouts)} syncs | allowed |",
        "|---|---|---|---|",
    ]
    own = baseline.metrics() if baseline else {}
    for words, metric, bound in STATISTICS:
        name = f"log_prob_difference_{metric}"
        before = f"{own[name]:.2g}" if own else "none"
        most = f"{getattr(allowed, bound):.2g}" if verify else "any"
        lines.append(f"| {words} | {before} | {max(each[name] for each in rollouts):.2g} | {most} |")
    lines += ["", "A sequence or position is judged by its lower three quarters, see harness/weights/log_probs.py.", ""]
    return lines + _costs(rollouts, seconds)


def what_was_done(verify: bool, can_ask: bool, rollouts: Sequence[Metrics], rehearsed: bool) -> str:
    """Return sentences on what was checked around the syncs before these rollouts."""
    if not verify:
        return "weights.verify = false. Nothing was checked; the differences were only measured."
    said = {
        "Before the first step every tensor was changed, synced, and changed back; with the changed weights the log-probs of"
        " engine and trainer agreed within what is allowed.": rehearsed,
        "Before every sync the engine overwrote all that the sync was to fill.": _each(rollouts, "poisoned"),
        "After it, 64-bit fingerprints of every element that it fills were compared with the trainer's, and those of the"
        " engine's other buffers with what they were at first; what the engine computes as it loads, or derives from"
        " weights, with what its own loader makes of the trainer's tensors.": can_ask,
        "After the rollout they were compared again.": _each(rollouts, "held"),
        "The trainer's forward passes used the weights that were sent, also by fingerprint.": _each(
            rollouts, "forward"
        ),
        "The log-probs of the engine's responses were compared with the trainer's.": True,
    }
    return " ".join(["weights.verify = true.", *(sentence for sentence, is_so in said.items() if is_so)])


def _costs(rollouts: Sequence[Metrics], seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a table of what the sync and each part of its verification took."""
    once = ("sync", "verify_baseline", "verify_perturb", "verify_push", "verify_generate", "verify_changed_log_probs")
    parts = {name: list(seconds[name]) for name in once if name in seconds}
    names = dict.fromkeys(name for each in rollouts for name in each if name.startswith("seconds/verify_"))
    parts |= {name.partition("/")[2]: [each[name] for each in rollouts if name in each] for name in names}
    rows = [
        f"| {part.removeprefix('verify_')} | {len(each)} | {sum(each) / len(each):.3f} | {max(each):.3f} |"
        for part, each in parts.items()
    ]
    return ["| part | times | mean s | largest s |", "|---|---|---|---|", *rows]
