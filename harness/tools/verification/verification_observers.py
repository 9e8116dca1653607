"""What the tools here see of a run. Light: transformers and SGLang come with the parts that are built."""

from typing import TYPE_CHECKING, Any

from harness.runtime.observer import Observer, RunContext

if TYPE_CHECKING:
    from harness.weights.verify import Verification


class ReadBack(Observer):
    """Has a run verify its syncs at any level, and on GPUs, that each engine rank is on the GPU that the config says."""

    def met(self, run: RunContext) -> None:
        self.run = run
        run.classes["verification"] = read_back_verification

    def built(self, name: str, part: Any) -> None:
        if name == "engine":
            from harness.tools.verification.engine_gpus import check_gpus

            check_gpus(self.run.world, part, self.run.config.parallel.colocate)


def read_back_verification(**parts: Any) -> "Verification":
    from harness.tools.verification.levels import ReadBackVerification

    return ReadBackVerification(**parts)
