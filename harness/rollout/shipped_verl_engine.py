"""The VerlEngine that sglang ships itself (0.4.3.post3 to 0.4.7.post1), behind the harness's interface.

Its ways are kept, because their failures are what one runs it for: one tensor a call, memory released and resumed all
at once, no check of what a call returned.
"""

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from harness.rollout import sglang_api
from harness.rollout.verl_engine import NamedTensors, VerlEngine


class ShippedVerlEngine(VerlEngine):
    """sglang's own VerlEngine; every rank has one, and it does its own gathering and broadcasting."""

    _mesh: DeviceMesh
    _every_rank_builds = True

    def __init__(self, device_mesh_cpu: DeviceMesh, nnodes: int | None = None, **arguments: Any) -> None:
        """Build it, as VerlEngine does. Raises ValueError where sglang ships none, and for a mesh with pipeline stages."""
        if device_mesh_cpu.ndim != 1:
            raise ValueError(
                "parallel.pp > 1: sglang's own VerlEngine knows only tp; use engine.implementation = harness."
            )
        self._mesh = device_mesh_cpu
        super().__init__(device_mesh_cpu, nnodes, **arguments)

    def _generate(self, arguments: dict[str, Any]) -> Any:
        return sglang_api.generate(self._engine, **arguments)

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Send one call a tensor, as it did; whether it flushes the cache depends on the release."""
        self._engine.update_weights_from_tensor(list(named_tensors), load_format=load_format)

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Free all GPU memory of the engine; these releases know no tags."""
        sglang_api.memory_arguments(self.api, tags)
        self._engine.release_memory_occupation()
        self.group.barrier()  # it returns on TP rank 0 long before the others, as does resume

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take all of it back."""
        sglang_api.memory_arguments(self.api, tags)
        self._engine.resume_memory_occupation()
        self.group.barrier()

    @property
    def inner(self) -> Any:
        """The sglang.Engine of this process, None where there is none."""
        return getattr(self._engine, "_engine", None)

    def _start(self, arguments: dict[str, Any]) -> Any:
        own = {name: value for name, value in arguments.items() if name not in ("tp_size", "nnodes", "node_rank")}
        return sglang_api.build_own_verl_engine(self.api, self._mesh, self.nnodes, own)
