"""HttpEngine: a RolloutEngine behind HTTP.

It starts SGLang's own server on the CPU and speaks to it by its public endpoints.

The trainer, the sync and the PPO step run with it as they are: run(config, engine_class=HttpEngine). It cannot be asked
(its schedulers are nobody's children here), so log-probs alone show whether weights arrived.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from harness.rollout import sglang_api
from harness.rollout.engine import EngineFailed, EngineRecord, NamedTensors
from harness.rollout.engine_ranks import Group, together
from tests.tools.verify.plain_server import PlainServer

T = TypeVar("T")


class HttpEngine:
    """One SGLang server for the ranks of a mesh over tp. The head starts it and makes all its calls."""

    nnodes = 1
    has_memory_saver = False
    holds_graphs = False
    can_ask = False

    def __init__(self, device_mesh_cpu: DeviceMesh, *, log_dir: Path, base_port: int = 30000, **arguments: Any) -> None:
        """Start the server; return on every rank when it serves.

        Takes VerlEngine's arguments, and uses some of them.
        """
        self.group = Group.of(device_mesh_cpu)
        self._api = sglang_api.probe()
        self.version = self._api.version
        for unused in ("colocate", "preset", "on_death", "record_call"):
            arguments.pop(unused, None)
        self._is_head = self.group.rank == self.group.head
        self._in_update = False
        self._server: PlainServer | None = None
        self._arguments: dict[str, Any] = self._on_head(
            lambda: self._start_server(arguments, log_dir / "server.log", base_port)
        )

    def generate(
        self,
        *,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any],
        return_logprob: bool = False,
        return_routed_experts: bool = False,
    ) -> list[dict[str, Any]]:
        asked = {
            "input_ids": [list(ids) for ids in input_ids],
            "sampling_params": dict(sampling_params),
            "return_logprob": return_logprob,
            "return_routed_experts": return_routed_experts,
        }
        answers: list[dict[str, Any]] = self._call("generate", **asked)
        return answers

    def record(self) -> EngineRecord:
        return EngineRecord(arguments=self._arguments)

    def seed(self, number: int) -> None:
        """Do nothing: SGLang's server has no call for it."""

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        if self._in_update or not self._api.update_session:
            yield
            return
        self._call("begin_weight_update")
        self._in_update = True
        try:
            yield
        finally:
            self._in_update = False
        self._call("end_weight_update")

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Send the head's tensors to every rank, by value."""
        with self.weight_update():
            self._on_head(lambda: self._up.send_tensors([named_tensors] * self.group.tp, load_format, flush_cache))

    def update_weights_from_distributed(self, named_tensors: NamedTensors, flush_cache: bool = True) -> NoReturn:
        raise EngineFailed("it has no process group with the trainer")

    def update_weights_from_disk(self, path: str) -> None:
        self._call("update_weights_from_disk", model_path=path, load_format="auto")

    def set_weight_version(self, version: str) -> None:
        self._call("update_weight_version", new_version=version, abort_all_requests=False)

    def flush_cache(self) -> None:
        self._on_head(lambda: self._up.request("flush_cache", b""))

    def release_memory_occupation(self, tags: Sequence[str]) -> None:
        self._call("release_memory_occupation", tags=list(tags))

    def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        self._call("resume_memory_occupation", tags=list(tags))

    def ask(self, function: Callable[[Any, Any], T], argument: object = None) -> NoReturn:
        raise EngineFailed("a server cannot be asked")

    def shutdown(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
        self.group.barrier()

    @property
    def _up(self) -> PlainServer:
        assert self._server is not None
        return self._server

    def _start_server(self, arguments: Mapping[str, Any], log: Path, base_port: int) -> dict[str, Any]:
        self._server = PlainServer({**arguments, "tp_size": self.group.tp}, log, base_port)
        return self._server.arguments

    def _call(self, method: str, **body: Any) -> Any:
        return self._on_head(lambda: self._up.post(method, **body))

    def _on_head(self, work: Callable[[], T]) -> T:
        """Run work() on the head; return its value, or raise its failure, on every rank."""
        value = together(lambda: work() if self._is_head else None, self.group.process_group)
        found: Any = self.group.broadcast(value)
        return found
