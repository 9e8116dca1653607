"""What a run's verdict may claim of its syncs."""

from collections.abc import Mapping, Sequence

from harness.weights.verify import Verification

Metrics = Mapping[str, float]

CHECKED = {
    "bytes": ["each read back bit for bit"],
    "full": ["each rehearsed on garbage with changed weights, compared with a reload from disk, read back bit for bit"],
}


def verdict_phrase(verification: Verification, rollouts: Sequence[Metrics]) -> str:
    """Return one phrase on the syncs of these rollouts; it claims nothing of what was not checked."""
    largest = max(each["log_prob_difference_mean"] for each in rollouts)
    syncs, level = f"{len(rollouts)} weight syncs", verification.config.weights.verify
    if level == "off":
        return f'{syncs}, not verified (weights.verify = "off"): largest mean log-prob difference {largest:.1e}'
    phrases = "; ".join([*CHECKED.get(level, ()), *what_is_known(rollouts)])
    return f"{syncs}: {phrases}; largest mean difference {largest:.1e}, allowed {verification.allowed.mean:.2g}"


def what_is_known(rollouts: Sequence[Metrics]) -> list[str]:
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
