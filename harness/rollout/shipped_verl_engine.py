"""The VerlEngine that sglang ships itself (0.4.3.post3 to 0.4.7.post1), behind the harness's interface.

Its ways are its own and are kept, because their failures are what one runs it for: one tensor a call, memory released
and resumed all at once, no check of what a call returned.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.rollout import sglang_api
from harness.rollout.verl_engine import NamedTensors, VerlEngine


class ShippedVerlEngine(VerlEngine):
    """sglang's own VerlEngine; every rank holds one, and it does its own gathering and broadcasting."""

    _mesh: DeviceMesh

    def __init__(self, device_mesh_cpu: DeviceMesh, nnodes: int | None = None, **arguments: Any) -> None:
        """As VerlEngine. Raises ValueError where sglang ships none, and for a mesh with pipeline stages."""
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
        """One call a tensor, as it was; it flushes the cache by itself where its release does."""
        self._engine.update_weights_from_tensor(list(named_tensors), load_format=load_format)

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Free all GPU memory of the engine; these releases know no tags."""
        sglang_api.memory_arguments(self.api, tags)
        self._engine.release_memory_occupation()
        self._meet()

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take all of it back."""
        sglang_api.memory_arguments(self.api, tags)
        self._engine.resume_memory_occupation()
        self._meet()

    def _meet(self) -> None:
        """Its release and resume return on TP rank 0 long before the others."""
        dist.barrier(group=self.group.process_group)

    @property
    def _takes_part(self) -> bool:
        return True

    @property
    def inner(self) -> Any:
        return getattr(self._engine, "_engine", None)

    def _start(self, arguments: dict[str, Any]) -> Any:
        own = {name: value for name, value in arguments.items() if name not in ("tp_size", "nnodes", "node_rank")}
        return sglang_api.build_own_verl_engine(self.api, self._mesh, self.nnodes, own)
