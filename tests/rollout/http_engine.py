"""HttpEngine: a RolloutEngine behind HTTP.

It starts SGLang's own server on the CPU and speaks to it by its public endpoints.

The trainer, the sync and the PPO step run with it as they are: run(config, engine_class=HttpEngine). It cannot be asked
(its schedulers are nobody's children here), so log-probs alone show whether weights arrived.
"""

import base64
import json
import os
import pickle
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
from torch.distributed.device_mesh import DeviceMesh

from harness.cluster.ports import PortLease
from harness.rollout import sglang_api
from harness.rollout.cpu_mode import cpu_environment
from harness.rollout.defaults import engine_defaults
from harness.rollout.engine import EngineRecord, NamedTensors
from harness.rollout.engine_errors import EngineFailed
from harness.rollout.engine_ranks import Group, together
from harness.rollout.update_group import UpdateGroup
from harness.runtime.child_environment import child_environment
from harness.runtime.cpu_standins import activate
from harness.runtime.processes import end_processes

T = TypeVar("T")

START_SECONDS = 240.0
CALL_SECONDS = 300.0
HEALTH_SECONDS = 5.0


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
        activate()
        self.group = Group.of(device_mesh_cpu)
        self._api = sglang_api.probe()
        self.version = self._api.version
        for unused in ("colocate", "preset", "on_death", "record_call"):
            arguments.pop(unused, None)
        self._arguments, _ = sglang_api.check_arguments(self._api, arguments, engine_defaults("cpu"))
        self._is_head = self.group.rank == self.group.head
        self._in_update = False
        self._lease = PortLease(base_port) if self._is_head else None
        self._server: subprocess.Popen[bytes] | None = None
        self._update_group: UpdateGroup | None = None
        self._on_head(lambda: self._start_server(log_dir))

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
        answers: list[dict[str, Any]] = self._on_head(lambda: self._post("generate", **asked))
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
        """Send the head's tensors by value: a handle of shared memory could be opened by one scheduler only."""
        with self.weight_update():
            self._on_head(lambda: self._send(named_tensors, load_format, flush_cache))

    def update_weights_from_distributed(self, named_tensors: NamedTensors, flush_cache: bool = True) -> None:
        with self.weight_update():
            self._on_head(lambda: self._open_update_group().broadcast(named_tensors, flush_cache))

    def update_weights_from_disk(self, path: str) -> None:
        self._call("update_weights_from_disk", model_path=path, load_format="auto")

    def set_weight_version(self, version: str) -> None:
        self._on_head(lambda: self._post("update_weight_version", new_version=version, abort_all_requests=False))

    def flush_cache(self) -> None:
        self._on_head(lambda: self._request("flush_cache", b""))

    def release_memory_occupation(self, tags: Sequence[str]) -> None:
        self._call("release_memory_occupation", tags=list(tags))

    def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        self._call("resume_memory_occupation", tags=list(tags))

    def ask(self, function: Callable[[Any, Any], T], argument: object = None) -> NoReturn:
        raise EngineFailed("a server cannot be asked")

    def shutdown(self) -> None:
        if self._update_group:
            self._update_group.close()
            self._update_group = None
        self._end_server()
        if self._lease:
            self._lease.close()
        self.group.barrier()

    def _start_server(self, log_dir: Path) -> None:
        assert self._lease is not None
        port = self._lease.ports.port
        named = self._arguments | {"tp_size": self.group.tp, "host": "127.0.0.1", "port": port}
        command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
        for name, value in named.items():
            if value is not False:
                command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        log_dir.mkdir(parents=True, exist_ok=True)
        with child_environment(cpu_environment(self.group.tp)), (log_dir / "server.log").open("wb") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            self._wait_until_up(self._server, log.name)
        except BaseException:  # the caller has no engine yet that it could shut down
            self._end_server()
            self._lease.close()
            raise

    def _wait_until_up(self, server: "subprocess.Popen[bytes]", log: str) -> None:
        """Return when the server serves; raise EngineFailed if it exits, or does not serve within START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            try:
                code = server.wait(0.2)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise EngineFailed(f"the server did not serve within {START_SECONDS:.0f} s; see {log}") from None
                continue
            raise EngineFailed(f"the server exited with code {code} before it served; see {log}")

    def _end_server(self) -> None:
        """End the server and its schedulers, if it was started."""
        if self._server and self._server.poll() is None:
            root = psutil.Process(self._server.pid)
            end_processes({each.pid: each for each in [root, *root.children(recursive=True)]})
            self._server.wait()
        self._server = None

    def _is_up(self) -> bool:
        try:
            self._request("health", None, HEALTH_SECONDS)
        except (OSError, EngineFailed):  # it does not listen yet, or is still loading
            return False
        return True

    def _send(self, named_tensors: NamedTensors, load_format: str | None, flush_cache: bool) -> None:
        sent: Any = [(name, tensor.detach().cpu()) for name, tensor in named_tensors]
        if load_format == "flattened_bucket":
            sent = sglang_api.flattened_bucket(sent)
        payload = base64.b64encode(pickle.dumps(sent)).decode()
        self._post_checked(
            "update_weights_from_tensor",
            serialized_named_tensors=[payload] * self.group.tp,
            load_format=load_format,
            flush_cache=flush_cache,
        )

    def _open_update_group(self) -> UpdateGroup:
        if self._update_group is None:
            assert self._lease is not None
            address = "127.0.0.1", self._lease.ports.update_group_port
            self._update_group = UpdateGroup(self._post_checked, address, self.group.tp, "gloo")
        return self._update_group

    def _call(self, method: str, **body: Any) -> None:
        self._on_head(lambda: self._post_checked(method, **body))

    def _on_head(self, work: Callable[[], T]) -> T:
        """Run work() on the head; return its value, or raise its failure, on every rank."""
        value = together(lambda: work() if self._is_head else None, self.group.process_group)
        found: Any = self.group.broadcast(value)
        return found

    def _post_checked(self, method: str, **body: Any) -> None:
        answer = self._post(method, **body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailed(f"{method}: the server refused: {answer.get('message')}")

    def _post(self, method: str, **body: Any) -> Any:
        text = self._request(method, json.dumps(body).encode())
        return json.loads(text) if text else None

    def _request(self, path: str, body: bytes | None, seconds: float = CALL_SECONDS) -> bytes:
        """Return the body of the answer. body: None makes it a GET."""
        assert self._lease is not None
        url = f"http://127.0.0.1:{self._lease.ports.port}/{path}"
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise EngineFailed(f"{path}: the server answered {error.code}: {error.read()[:500]!r}") from error
