"""PlainServer: SGLang's own server on this machine's CPU, as anybody starts it, and its public endpoints."""

import base64
import json
import os
import pickle
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from harness.cluster.ports import PortLease
from harness.rollout import sglang_api
from harness.rollout.engine import EngineFailed, NamedTensors
from harness.rollout.engine_settings import cpu_environment, engine_defaults, engine_environment
from harness.runtime.processes import end_processes

START_SECONDS = 480.0
CALL_SECONDS = 300.0
ANSWER_SECONDS = 5.0


class PlainServer(AbstractContextManager["PlainServer"]):
    """A server that serves, with all its processes and a block of ports, until close()."""

    def __init__(self, arguments: Mapping[str, Any], log: Path, base_port: int = 30000) -> None:
        """Start it and return when it serves.

        arguments: SGLang's, by the names of ServerArgs; model_path at least. The CPU's defaults are added. log: the
        file for what it prints. Raise EngineFailed if it exits, or does not serve within START_SECONDS.
        """
        self.arguments, _ = sglang_api.check_arguments(sglang_api.probe(), arguments, engine_defaults("cpu"))
        self.tp = int(self.arguments.get("tp_size", 1))
        self._log = log
        self._lease = PortLease(base_port)
        self.ports = self._lease.ports
        self.url = f"http://127.0.0.1:{self.ports.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        own = engine_environment(os.environ, cpu_environment(self.tp))  # a rank may have started it
        with log.open("wb") as output:
            self._process = subprocess.Popen(self._command(), stdout=output, stderr=output, env=own)
        try:
            self._wait_until_up()
        except BaseException:  # the caller has no server yet that it could close
            self.close()
            raise

    def is_up(self) -> bool:
        """Whether it answers; false while it still loads.

        SGLang's /health generates a token, which an update of weights may find still running and refuse.
        """
        try:
            self.request("model_info", None, ANSWER_SECONDS)
        except (OSError, EngineFailed):
            return False
        return True

    def post(self, path: str, **body: Any) -> Any:
        """Return the endpoint's answer. Raise EngineFailed for one that is no success."""
        text = self.request(path, json.dumps(body).encode())
        answer = json.loads(text) if text else None
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailed(f"{path}: the server refused: {answer.get('message')}")
        return answer

    def send_tensors(
        self, by_rank: Sequence[NamedTensors], load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """Send each TP rank its named tensors, by value: a handle of shared memory could be opened by one rank only."""
        self.post(
            "update_weights_from_tensor",
            serialized_named_tensors=[_serialized(named, load_format) for named in by_rank],
            load_format=load_format,
            flush_cache=flush_cache,
        )

    def request(self, path: str, body: bytes | None, seconds: float = CALL_SECONDS) -> bytes:
        """Return the body of the answer. body: None makes it a GET."""
        request = urllib.request.Request(f"{self.url}/{path}", data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise EngineFailed(f"{path}: the server answered {error.code}: {error.read()[:500]!r}") from error

    def close(self) -> None:
        """End it and its schedulers, and give the ports back. A second call does nothing."""
        if self._process.poll() is None:
            root = psutil.Process(self._process.pid)
            end_processes({each.pid: each for each in [root, *root.children(recursive=True)]})
            self._process.wait()
        self._lease.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
        for name, value in (self.arguments | {"host": "127.0.0.1", "port": self.ports.port}).items():
            if value is not False:
                command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return command

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_up():
            try:
                code = self._process.wait(0.2)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise EngineFailed(
                        f"the server did not serve within {START_SECONDS:.0f} s; see {self._log}"
                    ) from None
                continue
            raise EngineFailed(f"the server exited with code {code} before it served; see {self._log}")


def _serialized(named_tensors: NamedTensors, load_format: str | None) -> str:
    sent: Any = [(name, tensor.detach().cpu()) for name, tensor in named_tensors]
    if load_format == "flattened_bucket":
        sent = sglang_api.flattened_bucket(sent)
    return base64.b64encode(pickle.dumps(sent)).decode()
