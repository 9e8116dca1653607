"""What a rank may say to its watchdog, a JSON object a line: taken apart here, and refused where it is anything else."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

LONGEST_LINE = 4 << 20
"""Bytes: the posts of thousands of hosts, and no more."""
_INT, _TEXT, _STEP = (int,), (str,), (int, NoneType)
_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "hello": {"rank": _INT, "handler": _STEP},
    "begins": {"phase": _TEXT, "step": _STEP, "deadline": (int, float, NoneType)},
    "ends": {"phase": _TEXT},
    "injected": {"fault": _TEXT},
    "interrupted": {"signal": _TEXT},
    "failed": {"error": _TEXT, "echo": (bool,), "trace": (list,)},
    "bye": {"code": _INT},
    "flush": {},
    "peers": {"nodes": (list,), "own": _INT, "key": _TEXT, "folder": _TEXT},
}
_NODE: Mapping[str, tuple[type, ...]] = {"host": _TEXT, "ranks": (list,), "address": _TEXT, "port": _INT}


class MalformedError(ValueError):
    """What came is no message of a rank."""


def parse(line: bytes) -> dict[str, Any]:
    """Return the message; raises MalformedError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"a line that is no JSON: {type(error).__name__}") from error
    if not isinstance(message, dict) or not isinstance(message.get("say"), str) or message["say"] not in _FIELDS:
        raise MalformedError("a line that is no message")
    _check(message, {**_FIELDS[message["say"]], "say": _TEXT})
    if message["say"] == "failed":
        _check_all(message["trace"], str)
    if message["say"] == "peers":
        _check_peers(message)
    return message


@dataclass(slots=True)
class Lines:
    """Splits what comes into lines of bounded length."""

    _data: bytes = b""

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole; an empty one, which is no message, in the place of what is too long."""
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > LONGEST_LINE:
            lines, self._data = [*lines, b""], b""
        return [line if len(line) <= LONGEST_LINE else b"" for line in lines]


def _check(message: Any, fields: Mapping[str, tuple[type, ...]]) -> None:
    if not isinstance(message, dict) or message.keys() != fields.keys():
        raise MalformedError("a message with other fields")
    for name, types in fields.items():
        value = message[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise MalformedError(f"a message whose {name} is of another type")


def _check_all(values: list[Any], kind: type) -> None:
    if not all(type(value) is kind for value in values):
        raise MalformedError("a list of other things")


def _check_peers(message: Mapping[str, Any]) -> None:
    for node in message["nodes"]:
        _check(node, _NODE)
        _check_all(node["ranks"], int)
        if not 0 <= node["port"] < 1 << 16:
            raise MalformedError("no port")
    try:
        bytes.fromhex(message["key"])
    except ValueError as error:
        raise MalformedError("a key that is none") from error
    if not 0 <= message["own"] < len(message["nodes"]):
        raise MalformedError("a host that is not in its own list")
