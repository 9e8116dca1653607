"""Check that all ranks of a run have the same config, and the same variables that change what torch, NCCL and SGLang
do.
"""

import os
from collections.abc import Mapping

from harness.cluster.network import ADDRESS_VARIABLES
from harness.cluster.world import WorldError, all_gather, behaviour
from harness.config.layers import digest
from harness.observer import Observer, RunContext
from harness.runtime.ranks import values_in_words

# These may differ between ranks: placement and the choice of a network take care of them.
RANK_OWN_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_HOSTID",
    *ADDRESS_VARIABLES,
}


class Agreement(Observer):
    """Ends a run whose ranks have different configs, and warns about variables that differ."""

    def met(self, run: RunContext) -> None:
        for sentence in check_agreement(digest(run.config), os.environ):
            run.events.say(f"warning: {sentence}")


def check_agreement(config_digest: str, environment: Mapping[str, str]) -> list[str]:
    """Compare the config and the behaviour-changing environment of all ranks; the same result on every rank.

    Return one sentence for each variable that differs, with its values by rank. Raise WorldError if the configs differ,
    because those ranks would run different programs.
    """
    mine = {name: value for name, value in behaviour(environment).items() if name not in RANK_OWN_VARIABLES}
    digests, environments = zip(*all_gather((config_digest, mine)), strict=True)
    if len(set(digests)) > 1:
        raise WorldError(
            f"the resolved config differs between ranks ({values_in_words({rank: each[:8] for rank, each in enumerate(digests)})});"
            " start every host with the same files and overrides."
        )
    names = sorted(set().union(*environments))
    values = {name: {rank: each.get(name) for rank, each in enumerate(environments)} for name in names}
    different = {name: seen for name, seen in values.items() if len(set(seen.values())) > 1}
    return [f"{name} differs between ranks: {values_in_words(seen)}" for name, seen in different.items()]
