"""What may be done to emulated hosts, as the command line writes it: "20ms", "1%", "1gbit", "host1@sync:1", "host1=+90s"."""

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.runtime.errors import UnsupportedEnvironment

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Decimal, as tc's."""
QUANTITIES = {
    "--latency": (SECONDS, 0.0, math.inf, "a duration in us, ms, s or min, such as 20ms"),
    "--loss": ({"%": 0.01}, 0.0, 1.0, "a share of the packets, 0% to 100%"),
    "--bandwidth": (BITS, 1.0, math.inf, "a rate of at least 1bit in bit, kbit, mbit or gbit, such as 1gbit"),
}
"""Option -> units, least and largest value, and what it must be in words."""


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
class HostFault:
    """One host loses its link (cut) or its power (kill), when its first rank begins a phase or after some seconds."""

    kind: Literal["cut", "kill"]
    host: str
    phase: str = ""
    step: int | None = None
    """None: whichever comes first."""
    seconds: float = 0.0
    """After torchrun was started in all hosts; without a phase."""

    @property
    def when(self) -> str:
        """The time in words."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"at {self.phase}{step}" if self.phase else f"{self.seconds:g} s after the start"

    def matches(self, host: str, phase: str, step: int | None) -> bool:
        """Return whether this phase of this host is meant."""
        return (host, phase) == (self.host, self.phase) and self.step in (None, step)


def quantity(option: str, text: str) -> float:
    """Return the value of "20ms", "1%" or "1gbit" in seconds, as a fraction, in bits per second. Raise ValueError."""
    units, least, most, must_be = QUANTITIES[option]
    value = _with_unit(text, units)
    if value is None or not least <= value <= most:
        raise ValueError(f'{option} must be {must_be}, got "{text}".')
    return value


def _with_unit(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.lower())
    return float(match[1]) * units[match[2]] if match else None


def host_fault(kind: Literal["cut", "kill"], text: str, hosts: Sequence[str]) -> HostFault:
    """Parse "host1@sync", "host1@sync:1" or "host1@12s". Raise ValueError that names the option."""
    host, when = _of_host(f"--{kind}", text, "@", hosts)
    if (seconds := _with_unit(when, SECONDS)) is not None:
        return HostFault(kind, host, seconds=seconds)
    if match := re.fullmatch(r"([A-Za-z_]\w*)(?::(\d+))?", when):
        return HostFault(kind, host, match[1], None if match[2] is None else int(match[2]))
    raise ValueError(
        f"--{kind} must be {host}@PHASE, {host}@PHASE:STEP or {host}@SECONDSs, such as {host}@sync:1 or {host}@12s,"
        f' got "{text}".'
    )


def skew(text: str, hosts: Sequence[str]) -> tuple[str, float]:
    """Return host and seconds of "host1=+90s" or "host1=-5min". Raise ValueError that names the option."""
    host, offset = _of_host("--skew", text, "=", hosts)
    seconds = _with_unit(offset[1:], SECONDS)
    if seconds is None or offset[0] not in "+-":
        raise ValueError(f'--skew must have an offset with a sign, {host}=+90s or {host}=-90s, got "{text}".')
    return host, seconds if offset[0] == "+" else -seconds


def _of_host(option: str, text: str, separator: str, hosts: Sequence[str]) -> tuple[str, str]:
    host, _, rest = text.partition(separator)
    if host not in hosts:
        raise ValueError(f'{option} must name one of the hosts {", ".join(hosts)}, got "{text}".')
    return host, rest


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
    spec = importlib.util.find_spec("libfaketime")
    folders = spec.submodule_search_locations if spec else None
    found = next((file for folder in folders or () for file in Path(folder).rglob("libfaketime.so.1")), None)
    if found is None:
        raise UnsupportedEnvironment(
            "--skew needs libfaketime.so.1 of the package libfaketime, which is not installed."
        )
    return found
