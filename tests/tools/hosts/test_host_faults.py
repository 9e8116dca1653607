from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.hosts.host_plan import HostFault, host_fault

HOSTS = ("host0", "host1")


@given(
    st.sampled_from(("cut", "kill")),
    st.sampled_from(HOSTS),
    st.from_regex(r"[a-z][a-z_]*", fullmatch=True),
    st.none() | st.integers(0, 10**6),
)
def test_a_fault_at_a_phase_reads_as_it_was_written(
    kind: Literal["cut", "kill"], host: str, phase: str, step: int | None
) -> None:
    when = phase if step is None else f"{phase}:{step}"
    read = host_fault(kind, f"{host}@{when}", HOSTS)
    assert read == HostFault(kind, host, phase, step)


def test_a_fault_after_a_time() -> None:
    assert host_fault("kill", "host1@12s", HOSTS) == HostFault("kill", "host1", seconds=12.0)


@pytest.mark.parametrize(
    ("kind", "text", "facts"),
    [
        ("cut", "host2@sync", ("--cut", '"host2@sync"', "host0, host1")),
        ("cut", "host1", ("--cut", '"host1"', "host1@PHASE")),
        ("kill", "host1@", ("--kill", '"host1@"')),
        ("kill", "host1@sync:x", ("--kill", "host1@sync:1 or host1@12s")),
    ],
)
def test_a_mistake_is_named(kind: Literal["cut", "kill"], text: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        host_fault(kind, text, HOSTS)
    assert all(fact in str(raised.value) for fact in facts)
