"""All ranks of a run have one config, and one environment where it changes what torch, NCCL, CUDA and SGLang do."""

import os
from collections.abc import Mapping, Sequence

from harness.cluster.network import ADDRESS_VARIABLES
from harness.cluster.world import WorldError, all_gather, behaviour
from harness.config.layers import digest
from harness.runtime.observer import Observer, RunContext

# These differ between ranks by design: placement and the choice of a network handle them.
RANK_OWN_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_HOSTID",
    *ADDRESS_VARIABLES,
}


class Agreement(Observer):
    """Ends a run whose ranks have different configs; warns of variables that differ."""

    def met(self, run: RunContext) -> None:
        for sentence in check_agreement(digest(run.config), os.environ):
            run.events.say(f"warning: {sentence}")


def check_agreement(config_digest: str, environment: Mapping[str, str]) -> list[str]:
    """Compare the config and the behaviour-changing environment of all ranks; the same result on every rank.

    Return one sentence for each variable that differs, with its values by rank. Raise WorldError when the configs
    differ: those ranks would run different programs.
    """
    mine = {name: value for name, value in behaviour(environment).items() if name not in RANK_OWN_VARIABLES}
    digests, environments = zip(*all_gather((config_digest, mine)), strict=True)
    if len(set(digests)) > 1:
        raise WorldError(
            f"the resolved config differs between ranks ({by_rank([d[:8] for d in digests])});"
            " start every host with the same files and overrides."
        )
    names = sorted(set().union(*environments))
    values = {name: [each.get(name) for each in environments] for name in names}
    return [f"{name} differs between ranks: {by_rank(seen)}" for name, seen in values.items() if len(set(seen)) > 1]


def by_rank(values: Sequence[object]) -> str:
    """Group ranks by value: "0 on ranks 0, 2; unset on rank 1"; an empty string is shown as two quotes."""
    groups: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in groups.items():
        shown = "unset" if value is None else '""' if value == "" else value
        parts.append(f"{shown} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    return "; ".join(parts)
