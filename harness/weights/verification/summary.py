"""What a run may claim of its syncs: the verdict's phrase, and the section of the report."""

from collections.abc import Mapping, Sequence

from harness.config.precision import Precision
from harness.weights.log_probs import FACTOR, Allowed, LogProbDifference

Metrics = Mapping[str, float]
"""Of one rollout, with HeldWeights.metrics of the sync before it."""

PHRASES = {
    "bytes": ["each read back bit for bit"],
    "full": ["each rehearsed with changed weights, compared with a reload from disk, read back bit for bit"],
}
SENTENCES = {
    "off": "Nothing was checked; the differences were only measured.",
    "log_probs": "Before every sync the engine overwrote all that the sync was to fill. After it, and again after the rollout,"
    " 64-bit fingerprints of every element that it fills were compared with the trainer's, and those of the engine's other"
    " buffers with what they were at first. What the engine computes as it loads, or derives from weights, was compared with what"
    " its own loader makes of the trainer's tensors. The trainer's forward passes used the weights that were sent, also by"
    " fingerprint. The log-probs of the engine's responses were compared with the trainer's.",
    "bytes": "As log_probs; and after every sync all that it fills was read back and compared with the trainer's tensors bit for"
    " bit.",
    "full": "As bytes; and before every sync each tensor was changed, synced, read back bit for bit and compared with a reload"
    " from disk.",
}
WITHOUT_FINGERPRINTS = "After every sync, the log-probs of the engine's responses were compared with the trainer's."
STATISTICS = (
    ("mean", "mean", "mean"),
    ("mean of the three quarters that differ least", "bulk", "bulk"),
    ("worst sequence", "worst_sequence_bulk", "sequence"),
    ("worst response position", "worst_position_bulk", "position"),
)
"""(words, metric, field of Allowed)."""


def verdict_phrase(
    level: str,
    asked: str,
    can_ask: bool,
    rollouts: Sequence[Metrics],
    allowed: Allowed,
    not_covered: Sequence[str] = (),
    mismatch: str = "",
) -> str:
    """Return one phrase on the syncs before these rollouts; it claims nothing that was not checked.

    level: of the checks that were made. asked: weights.verify. not_covered: a sentence for each of what no check
    covers. mismatch: from mismatch_of_precisions.
    """
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    syncs = f"{len(rollouts)} weight sync" + "s" * (len(rollouts) > 1)
    syncs += " onto poison" * (can_ask and level != "off")
    if level == "off":
        found = mismatch or f"largest mean log-prob difference {largest:.1e}"
        return f'{syncs}, not verified (weights.verify = "off"): {found}'
    phrases = "; ".join([*PHRASES.get(level, ()), what_was_compared(level, asked, can_ask, rollouts, not_covered)])
    differ = mismatch or f"largest mean log-prob difference {largest:.1e}"
    return f"{syncs}: {phrases}; {differ}, allowed {allowed}; log-probs do not show an update that moves them less"


def mismatch_of_precisions(
    precision: Precision,
    rollouts: Sequence[Metrics],
    baseline: LogProbDifference | None,
    reload_was_exact: bool | None = None,
) -> str:
    """Return a phrase on how far a quantized engine is from the trainer; "" if both compute with the same numbers.

    reload_was_exact: whether a reload of the last sync's weights gave the same log-probs bit for bit; None: there was
    none.
    """
    if not precision.is_quantized:
        return ""
    engine, dtype = precision.of_engine, precision.computed
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    first = f"{baseline.mean:.1e} on its own first load" if baseline else "not measured on a load of its own"
    how = "greedy log-probs equal bit for bit" if reload_was_exact else "greedy log-probs within bfloat16's rounding"
    reload = "" if reload_was_exact is None else f"the last sync equals a reload of the saved {engine} weights, {how}; "
    return f"{reload}the {engine} engine and the {dtype} trainer differ by up to {largest:.1e} in the mean ({first})"


def what_was_compared(
    level: str, asked: str, can_ask: bool, rollouts: Sequence[Metrics], not_covered: Sequence[str] = ()
) -> str:
    """Return a phrase on what was compared after each sync, or on what it means that nothing could be."""
    if can_ask:
        compared = int(min(each.get("sync_tensors_compared", 0) for each in rollouts))
        tensors = int(max(each.get("sync_tensors", 0) for each in rollouts))
        derived = int(min(each.get("sync_tensors_derived", 0) for each in rollouts))
        whole = f"all {tensors}" if compared == tensors else f"{compared} of {tensors}"
        phrases = [
            f"after each, and again after its rollout, {whole} tensors in the engine equal the trainer's by fingerprint"
        ]
        if compared < tensors and not not_covered:
            phrases.append(f"the other {tensors - compared} left what the engine's loader computes of them")
        if derived:
            phrases.append(f"{derived} tensors that the engine derives are up to date")
        if not_covered:
            phrases.append(f"NOT compared: {'; '.join(not_covered)}")
        return ", ".join(phrases)
    missing = "fingerprints were" if level == asked else f'weights.verify = "{asked}" and fingerprints were'
    return (
        f"{missing} not possible, as this engine cannot be asked what it holds; log-probs alone do not show a failed sync if"
        " the update moves them by less than is allowed"
    )


def report_section(
    *,
    level: str,
    asked: str,
    can_ask: bool,
    rollouts: Sequence[Metrics],
    baseline: LogProbDifference | None,
    why_no_baseline: str,
    allowed: Allowed,
    is_exact: bool,
    not_covered: Sequence[str] = (),
    mismatch: str = "",
    seconds: Mapping[str, Sequence[float]],
) -> list[str]:
    """Return the report's section in Markdown: the level, the statistics and what was allowed, and what each part cost.

    mismatch: from mismatch_of_precisions.
    seconds: durations of phases by name; the phase "sync" is the sync itself, without its verification.
    """
    done = SENTENCES[level] if can_ask or level == "off" else WITHOUT_FINGERPRINTS
    lines = [f'weights.verify = "{asked}". {done}', ""]
    if level == "full":
        how = "bit for bit" if is_exact else "within the allowed mean, as the engine is not deterministic"
        lines += [f"Greedy outputs before and after the reload were equal {how}.", ""]
    if not baseline:
        lines += [f"No baseline of the log-prob difference, as {why_no_baseline}.", ""]
    if level != "off":
        lines += [f"- {what_was_compared(level, asked, can_ask, rollouts, not_covered)}", ""]
    if mismatch:
        why = "That is what the precision costs, so log-probs show only gross failures here; bytes show arrival."
        lines += [f"{mismatch[0].upper()}{mismatch[1:]}. {why}", ""]
    if allowed.rounding and level != "off":
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
        most = "any" if level == "off" else f"{getattr(allowed, bound):.2g}"
        lines.append(f"| {words} | {before} | {max(each[name] for each in rollouts):.2g} | {most} |")
    lines += ["", "A sequence or position is judged by its lower three quarters, see harness/weights/log_probs.py.", ""]
    return lines + _costs(rollouts, seconds)


def _costs(rollouts: Sequence[Metrics], seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a table of what the sync and each part of its verification took."""
    parts = {name: list(seconds[name]) for name in ("sync", "verify_baseline") if name in seconds}
    names = dict.fromkeys(name for each in rollouts for name in each if name.startswith("seconds/verify_"))
    parts |= {name.partition("/")[2]: [each[name] for each in rollouts if name in each] for name in names}
    rows = [
        f"| {part.removeprefix('verify_')} | {len(each)} | {sum(each) / len(each):.3f} | {max(each):.3f} |"
        for part, each in parts.items()
    ]
    return ["| part | times | mean s | largest s |", "|---|---|---|---|", *rows]
