"""What a run may claim of its syncs, in words: the verdict's part and the report's section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.weights.verify import Verification

Metrics = Mapping[str, float]

LEVELS = {
    "off": "Nothing was checked; the differences were only measured.",
    "log_probs": "After every sync 64-bit fingerprints of every element that the engine holds were compared with the"
    " trainer's, and the engine's log-probs of its responses with the trainer's. What the engine derives from weights"
    " (DeepSeek's absorbed projections) is compared at level bytes.",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What is known of the syncs of a run, in numbers."""

    syncs: int
    by_log_probs: int
    """Syncs that the engine's log-probs prove: one that did nothing would have been off by more than is allowed."""
    largest_movement: float
    """Of the updates before the other syncs, in nats."""
    compared: int
    """Tensors whose every element was compared after each sync, by fingerprint or as it is; 0 where none was."""
    tensors: int
    """Of the checkpoint."""
    unchanged: int
    """The most tensors that one sync brought as they had been before it: of these it is not known that it brought them."""

    @classmethod
    def of(cls, rollouts: Sequence[Metrics]) -> "Shown":
        """From the metrics of every rollout, as Verification.sync_metrics names them."""
        proven = [each for each in rollouts if each.get("sync_proven_by_log_probs")]
        others = [each for each in rollouts if not each.get("sync_proven_by_log_probs")]
        return cls(
            syncs=len(rollouts),
            by_log_probs=len(proven),
            largest_movement=max((each.get("sync_movement", 0.0) for each in others), default=0.0),
            compared=int(min(each.get("sync_tensors_compared", 0) for each in rollouts)),
            tensors=int(max(each.get("sync_tensors", 0) for each in rollouts)),
            unchanged=int(max(each.get("sync_tensors_unchanged", 0) for each in rollouts)),
        )

    def by_tensors(self, how: str) -> str:
        """What the comparison of tensors says; "" where there was none."""
        if not self.compared:
            return ""
        whole = f"all {self.tensors}" if self.compared == self.tensors else f"{self.compared} of {self.tensors}"
        text = f"after each, {whole} tensors in the engine equal the trainer's {how}"
        return text + (f" (up to {self.unchanged} of them did not change in an update)" if self.unchanged else "")

    def by_outputs(self) -> str:
        """What the log-probs say."""
        if self.by_log_probs == self.syncs:
            return "the engine's log-probs prove each"
        rest = self.syncs - self.by_log_probs
        why = (
            f"for {rest} the update moved log-probs by at most {self.largest_movement:.1e}, which a stale engine passes"
        )
        return f"the engine's log-probs prove {self.by_log_probs} of {self.syncs} ({why})"


def verdict_phrase(verification: Verification, rollouts: Sequence[Metrics]) -> str:
    """One phrase on the syncs of these rollouts; of what was not checked it claims nothing."""
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    syncs = f"{len(rollouts)} weight syncs"
    if not verification.reaches("log_probs"):
        return f'{syncs}, not verified (weights.verify = "off"): largest mean log-prob difference {largest:.1e}'
    shown = Shown.of(rollouts)
    done = {
        "log_probs": "",
        "bytes": "each read back bit for bit",
        "full": "each rehearsed on garbage with changed weights, compared with a reload from disk, read back bit for bit",
    }[verification.config.weights.verify]
    parts = [part for part in (done, shown.by_tensors("by fingerprint"), shown.by_outputs()) if part]
    if not shown.compared and shown.by_log_probs < shown.syncs:
        parts.append("nothing shows the others, as this sglang has no custom weight loaders (0.4.8)")
    return (
        f"{syncs}: {'; '.join(parts)}; largest mean difference {largest:.1e}, allowed {verification.allowed.mean:.2g}"
    )


def report_section(
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
    if verification.reaches("log_probs"):
        lines += [*_what_was_shown(Shown.of(rollouts), allowed.mean), ""]
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


def _what_was_shown(shown: Shown, allowed: float) -> list[str]:
    """A list of what the syncs are known to have done, and by what."""
    lines = [
        f"- Proven by log-probs: {shown.by_log_probs} of {shown.syncs} syncs. A sync is counted where the update before it, or"
        f" the garbage that the engine held, moves log-probs by more than the allowed {allowed:.2g}: one that did"
        " nothing would have failed."
    ]
    if shown.by_log_probs < shown.syncs:
        lines.append(
            f"- The updates before the others moved log-probs by at most {shown.largest_movement:.2g}: of these syncs the"
            " log-probs show nothing."
        )
    if shown.compared:
        lines.append(
            f"- Equal to the trainer's by fingerprint, after every sync: every element of {shown.compared} of"
            f" {shown.tensors} tensors."
        )
        lines.append(
            f"- Tensors that did not change at all between two syncs, so that their equality says nothing about the second"
            f" one: at most {shown.unchanged} of {shown.compared}."
        )
    if 0 < shown.compared < shown.tensors:
        lines.append(
            f"- Not compared: {shown.tensors - shown.compared} tensors, which the engine's loader computes with."
        )
    if not shown.compared:
        lines.append("- Tensors were not compared: this sglang has no custom weight loaders (0.4.8).")
    return lines


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
