"""Summary of a run's verified syncs: the phrase of its verdict and the section of its report."""

from collections.abc import Mapping, Sequence

from harness.weights.verify import Verification

Metrics = Mapping[str, float]

CHECKED = {
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
CHECKED_SHORT = {
    "log_probs": [],
    "bytes": ["each read back bit for bit"],
    "full": ["each rehearsed on garbage with changed weights, compared with a reload from disk, read back bit for bit"],
}
STATISTICS = (
    ("mean", "mean", "mean"),
    ("worst sequence", "worst_sequence_bulk", "sequence"),
    ("worst response position", "worst_position_bulk", "position"),
)


class SyncSummary:
    """What is known of the syncs of a run, from the metrics of every rollout, as Verification.sync_metrics names them."""

    def __init__(self, rollouts: Sequence[Metrics]) -> None:
        self.syncs = len(rollouts)
        others = [each for each in rollouts if not each.get("sync_proven_by_log_probs")]
        self.by_log_probs = self.syncs - len(others)
        """Syncs that the engine's log-probs prove: one that did nothing would have been off by more than is allowed."""
        self.largest_movement = max((each.get("sync_movement", 0.0) for each in others), default=0.0)
        """Of the updates before the other syncs, in nats."""
        self.compared = int(min(each.get("sync_tensors_compared", 0) for each in rollouts))
        """Tensors whose every element was compared after each sync; 0 where none was."""
        self.tensors = int(max(each.get("sync_tensors", 0) for each in rollouts))
        self.unchanged = int(max(each.get("sync_tensors_unchanged", 0) for each in rollouts))
        """The most tensors that were before a sync what they were after it: that it brought them is not known."""

    def phrases(self) -> list[str]:
        found = []
        if self.compared:
            whole = f"all {self.tensors}" if self.compared == self.tensors else f"{self.compared} of {self.tensors}"
            same = f" (up to {self.unchanged} of them did not change in an update)" if self.unchanged else ""
            found.append(f"after each, {whole} tensors in the engine equal the trainer's by fingerprint{same}")
        rest = self.syncs - self.by_log_probs
        if not rest:
            return [*found, "the engine's log-probs prove each"]
        found.append(
            f"the engine's log-probs prove {self.by_log_probs} of {self.syncs} (for {rest} the update moved log-probs by at"
            f" most {self.largest_movement:.1e}, which a stale engine passes)"
        )
        if not self.compared:
            found.append("nothing shows the others, as this sglang has no custom weight loaders (0.4.8)")
        return found

    def lines(self, allowed: float) -> list[str]:
        """Return a list in Markdown of what the syncs are known to have done, and by what."""
        lines = [
            f"- Proven by log-probs: {self.by_log_probs} of {self.syncs} syncs. A sync is counted where the update before it,"
            f" or the garbage that the engine held, moves log-probs by more than the allowed {allowed:.2g}: one that did"
            " nothing would have failed."
        ]
        if self.by_log_probs < self.syncs:
            lines.append(
                f"- The updates before the others moved log-probs by at most {self.largest_movement:.2g}: of these syncs the"
                " log-probs show nothing."
            )
        if not self.compared:
            return [*lines, "- Tensors were not compared: this sglang has no custom weight loaders (0.4.8)."]
        lines += [
            f"- Equal to the trainer's by fingerprint, after every sync: every element of {self.compared} of"
            f" {self.tensors} tensors.",
            "- Tensors that did not change at all between two syncs, so that their equality says nothing about the second"
            f" one: at most {self.unchanged} of {self.compared}.",
        ]
        left_out = self.tensors - self.compared
        return [
            *lines,
            *[f"- Not compared: {left_out} tensors, which the engine's loader computes with."] * (left_out > 0),
        ]


def verdict_phrase(verification: Verification, rollouts: Sequence[Metrics]) -> str:
    """Return one phrase on the syncs of these rollouts; it claims nothing of what was not checked."""
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    syncs, level = f"{len(rollouts)} weight syncs", verification.config.weights.verify
    if level == "off":
        return f'{syncs}, not verified (weights.verify = "off"): largest mean log-prob difference {largest:.1e}'
    phrases = "; ".join([*CHECKED_SHORT[level], *SyncSummary(rollouts).phrases()])
    return f"{syncs}: {phrases}; largest mean difference {largest:.1e}, allowed {verification.allowed.mean:.2g}"


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
        lines += [*SyncSummary(rollouts).lines(allowed.mean), ""]
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
    parts = {"sync": list(seconds.get("sync", ()))}
    for each in rollouts:
        for name, value in each.items():
            if name.startswith("verify/"):
                parts.setdefault(name.removeprefix("verify/").removesuffix("_seconds"), []).append(value)
    lines += ["| part | times | mean s | largest s |", "|---|---|---|---|"]
    spent = ((part, each) for part, each in parts.items() if each)
    return lines + [f"| {part} | {len(each)} | {sum(each) / len(each):.3f} | {max(each):.3f} |" for part, each in spent]
