"""EngineOfOldWeights: a VerlEngine that answers as though step 1's sync had not come. For ppo_with.py."""

from harness.rollout.verl_engine import VerlEngine


class EngineOfOldWeights(VerlEngine):
    """Keeps the name of the first step's weights."""

    def set_weight_version(self, version: str) -> None:
        super().set_weight_version("0")
