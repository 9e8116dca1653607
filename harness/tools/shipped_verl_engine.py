"""The VerlEngine that sglang ships itself (until 0.4.7.post1), behind the harness's interface.

Its ways are kept, because their failures are what one runs it for: one tensor a call, memory released and resumed all
at once, no check of what a call returned.
"""

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from harness.rollout.sglang_api import memory_arguments, source
from harness.rollout.sglang_api.probe import VERL_ENGINE
from harness.rollout.verl_engine import NamedTensors, VerlEngine


class ShippedVerlEngine(VerlEngine):
    """sglang's own VerlEngine; every rank has one, and it does its own gathering and broadcasting."""

    _mesh: DeviceMesh
    _every_rank_builds = True

    def __init__(self, device_mesh_cpu: DeviceMesh, nnodes: int | None = None, **arguments: Any) -> None:
        """Build it, as VerlEngine does, on a mesh of tp alone."""
        self._mesh = device_mesh_cpu
        super().__init__(device_mesh_cpu, nnodes, **arguments)

    def _generate(self, arguments: dict[str, Any]) -> Any:
        return self._engine.generate(**arguments)

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Send one call a tensor, as it did; whether it flushes the cache depends on the release."""
        self._engine.update_weights_from_tensor(list(named_tensors), load_format=load_format)

    def _move_memory(self, method: str, tags: Sequence[str] | None) -> None:
        getattr(self._engine, method)(**memory_arguments(self.api, tags))  # these releases know no tags
        self.group.barrier()  # it returns on TP rank 0 long before the others

    @property
    def inner(self) -> Any:
        """The sglang.Engine of this process, None where there is none."""
        return getattr(self._engine, "_engine", None)

    def _start(self, arguments: dict[str, Any]) -> Any:
        if not self.api.own_verl_engine:
            raise ValueError(
                f"engine.implementation = sglang: sglang {self.api.version} ships no VerlEngine; use harness, or install"
                " 0.4.6.post5 or 0.4.7.post1."
            )
        own = {name: value for name, value in arguments.items() if name not in ("tp_size", "nnodes", "node_rank")}
        return source.load(VERL_ENGINE, "VerlEngine")(device_mesh_cpu=self._mesh, nnodes=self.nnodes, **own)
