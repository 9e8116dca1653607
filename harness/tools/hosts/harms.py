"""What may be done to emulated hosts, as the command line says it: "20ms", "1%", "1gbit", "host1@sync:1", "host1=+90s"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"{_NUMBER}({'|'.join(SECONDS)})")
_RATE = re.compile(rf"{_NUMBER}({'|'.join(BITS)})", re.IGNORECASE)
_PERCENT = re.compile(rf"{_NUMBER}%")
_PHASE = re.compile(r"([A-Za-z_]\w*)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the wire treats every packet between two hosts."""

    latency: float = 0.0
    """Seconds that each packet takes, one way; a round trip takes twice that."""
    loss: float = 0.0
    """Chance that a packet is lost, 0 to 1."""
    bandwidth: float = 0.0
    """Bits per second that each host's link carries in each direction; 0 is no limit."""
    seed: int = 0
    """Which packets are lost: the same for the same seed and the same order of packets."""

    @property
    def any(self) -> bool:
        """Whether there is anything but forwarding to do."""
        return bool(self.latency or self.loss or self.bandwidth)


@dataclass(frozen=True, slots=True)
class AtPhase:
    """When the first rank of the harmed host begins this phase; of this step, or of whichever comes first."""

    phase: str
    step: int | None = None

    def matches(self, phase: str, step: int | None) -> bool:
        """Whether this phase is meant."""
        return phase == self.phase and self.step in (None, step)

    def __str__(self) -> str:
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"


@dataclass(frozen=True, slots=True)
class AfterSeconds:
    """So many seconds after torchrun was started in all hosts."""

    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:g} s after the start"


@dataclass(frozen=True, slots=True)
class Harm:
    """One host loses its link, or its power."""

    kind: Literal["cut", "kill"]
    host: str
    when: AtPhase | AfterSeconds

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.host} at {self.when}"
            if isinstance(self.when, AtPhase)
            else f"{self.kind} {self.host}, {self.when}"
        )


def duration(option: str, text: str) -> float:
    """Seconds of "20ms". Raises ValueError that names the option."""
    if not (match := _DURATION.fullmatch(text)):
        raise ValueError(f'{option} = "{text}" is no duration; give a number with {", ".join(SECONDS)}, such as 20ms.')
    return float(match[1]) * SECONDS[match[2]]


def rate(option: str, text: str) -> float:
    """Bits per second of "1gbit"; the units are decimal, as those of tc. Raises ValueError that names the option."""
    match = _RATE.fullmatch(text)
    if not match or not float(match[1]):
        raise ValueError(
            f'{option} = "{text}" is no bandwidth; give a number above 0 with {", ".join(BITS)}, such as 1gbit.'
        )
    return float(match[1]) * BITS[match[2].lower()]


def fraction(option: str, text: str) -> float:
    """0.01 of "1%". Raises ValueError that names the option."""
    match = _PERCENT.fullmatch(text)
    if not match or float(match[1]) > 100:
        raise ValueError(f'{option} = "{text}" is no share of the packets; give 0% to 100%, such as 1%.')
    return float(match[1]) / 100


def harm(kind: Literal["cut", "kill"], text: str, hosts: Sequence[str]) -> Harm:
    """Parse "host1@sync", "host1@sync:1" or "host1@12s". Raises ValueError that names the option."""
    host, at, when = text.partition("@")
    _known(f"--{kind}", text, host, hosts)
    if at and _DURATION.fullmatch(when):
        return Harm(kind, host, AfterSeconds(duration(f"--{kind}", when)))
    if at and (match := _PHASE.fullmatch(when)):
        return Harm(kind, host, AtPhase(match[1], None if match[2] is None else int(match[2])))
    raise ValueError(
        f'--{kind} = "{text}" does not say when; give {host}@PHASE, {host}@PHASE:STEP or {host}@SECONDSs,'
        f" such as {host}@sync:1 or {host}@12s."
    )


def skew(text: str, hosts: Sequence[str]) -> tuple[str, float]:
    """Host and seconds of "host1=+90s" or "host1=-5min". Raises ValueError that names the option."""
    host, equals, offset = text.partition("=")
    _known("--skew", text, host, hosts)
    if not equals or offset[:1] not in ("+", "-"):
        raise ValueError(f'--skew = "{text}" has no offset with a sign; give {host}=+90s or {host}=-90s.')
    seconds = duration("--skew", offset[1:])
    return host, seconds if offset[0] == "+" else -seconds


def _known(option: str, text: str, host: str, hosts: Sequence[str]) -> None:
    if host not in hosts:
        raise ValueError(f'{option} = "{text}" names the host "{host}"; the hosts are {", ".join(hosts)}.')
