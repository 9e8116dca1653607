"""What may be done to emulated hosts, as the command line writes it: "20ms", "1%", "1gbit", "host1@sync:1", "host1=+90s"."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from harness.runtime.errors import UnsupportedEnvironment

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Decimal, as tc's."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"{_NUMBER}({'|'.join(SECONDS)})")
_RATE = re.compile(rf"{_NUMBER}({'|'.join(BITS)})", re.IGNORECASE)
_PERCENT = re.compile(rf"{_NUMBER}%")
_PHASE = re.compile(r"([A-Za-z_]\w*)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """How the router treats every packet between two hosts."""

    latency: float = 0.0
    """Seconds that each packet takes, one way; a round trip takes twice that."""
    loss: float = 0.0
    """Chance that a packet is lost, 0 to 1."""
    bandwidth: float = 0.0
    """Bits per second that each host's link carries in each direction; 0 is no limit."""
    seed: int = 0
    """Which packets are lost: the same for the same seed and the same order of packets."""


@dataclass(frozen=True, slots=True)
class AtPhase:
    """When the first rank of the host begins this phase; of this step, or of whichever comes first."""

    phase: str
    step: int | None = None

    def matches(self, phase: str, step: int | None) -> bool:
        """Return whether this phase is meant."""
        return phase == self.phase and self.step in (None, step)

    def __str__(self) -> str:
        return f"at {self.phase}" + ("" if self.step is None else f" of step {self.step}")


@dataclass(frozen=True, slots=True)
class AfterSeconds:
    """So many seconds after torchrun was started in all hosts."""

    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:g} s after the start"


@dataclass(frozen=True, slots=True)
class HostFault:
    """One host loses its link, or its power."""

    kind: Literal["cut", "kill"]
    host: str
    when: AtPhase | AfterSeconds

    def __str__(self) -> str:
        return f"{self.kind} {self.host} {self.when}"


def duration(option: str, text: str) -> float:
    """Return the seconds of "20ms". Raise ValueError that names the option."""
    if not (match := _DURATION.fullmatch(text)):
        raise ValueError(f'{option} must be a number with {", ".join(SECONDS)}, such as 20ms, got "{text}".')
    return float(match[1]) * SECONDS[match[2]]


def rate(option: str, text: str) -> float:
    """Return the bits per second of "1gbit". Raise ValueError that names the option."""
    match = _RATE.fullmatch(text)
    if not match or not float(match[1]):
        raise ValueError(f'{option} must be a number above 0 with {", ".join(BITS)}, such as 1gbit, got "{text}".')
    return float(match[1]) * BITS[match[2].lower()]


def fraction(option: str, text: str) -> float:
    """Return 0.01 for "1%". Raise ValueError that names the option."""
    match = _PERCENT.fullmatch(text)
    if not match or float(match[1]) > 100:
        raise ValueError(f'{option} must be a share of the packets, 0% to 100%, got "{text}".')
    return float(match[1]) / 100


def host_fault(kind: Literal["cut", "kill"], text: str, hosts: Sequence[str]) -> HostFault:
    """Parse "host1@sync", "host1@sync:1" or "host1@12s". Raise ValueError that names the option."""
    host, at, when = text.partition("@")
    _check_host(f"--{kind}", text, host, hosts)
    if at and _DURATION.fullmatch(when):
        return HostFault(kind, host, AfterSeconds(duration(f"--{kind}", when)))
    if at and (match := _PHASE.fullmatch(when)):
        return HostFault(kind, host, AtPhase(match[1], None if match[2] is None else int(match[2])))
    raise ValueError(
        f"--{kind} must be {host}@PHASE, {host}@PHASE:STEP or {host}@SECONDSs, such as {host}@sync:1 or {host}@12s,"
        f' got "{text}".'
    )


def skew(text: str, hosts: Sequence[str]) -> tuple[str, float]:
    """Return host and seconds of "host1=+90s" or "host1=-5min". Raise ValueError that names the option."""
    host, equals, offset = text.partition("=")
    _check_host("--skew", text, host, hosts)
    if not equals or offset[:1] not in ("+", "-"):
        raise ValueError(f'--skew must have an offset with a sign, {host}=+90s or {host}=-90s, got "{text}".')
    seconds = duration("--skew", offset[1:])
    return host, seconds if offset[0] == "+" else -seconds


def _check_host(option: str, text: str, host: str, hosts: Sequence[str]) -> None:
    if host not in hosts:
        raise ValueError(f'{option} must name one of the hosts {", ".join(hosts)}, got "{text}".')


def skewed_clock(seconds: float, current: Mapping[str, str]) -> dict[str, str]:
    """Return variables under which the real-time clock of a program and its children is off by this much.

    By libfaketime, because Linux has one real-time clock for all namespaces. Monotonic clocks, which timeouts and sleeps
    use, stay true, and so do the times of files. Raise UnsupportedEnvironment if libfaketime is not installed.
    """
    return {
        "LD_PRELOAD": ":".join([str(faketime_library()), *filter(None, [current.get("LD_PRELOAD")])]),
        "FAKETIME": f"{seconds:+g}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "FAKETIME_NO_CACHE": "1",
    }


def faketime_library() -> Path:
    """Return the path of libfaketime's shared object. Raise UnsupportedEnvironment if it is not installed."""
    try:
        files = metadata.files("libfaketime") or []
    except metadata.PackageNotFoundError:
        raise UnsupportedEnvironment("--skew needs the package libfaketime, which is not installed.") from None
    for file in files:
        if file.name == "libfaketime.so.1" and (found := Path(str(file.locate()))).exists():
            return found
    raise UnsupportedEnvironment("--skew needs libfaketime.so.1, which the package libfaketime lacks for this machine.")
