from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runtime.events import STEP_PHASES
from harness.tools.hosts.host_plan import HostFault, host_fault

HOSTS = ("host0", "host1")


@given(
    st.sampled_from(("cut", "kill")),
    st.sampled_from(HOSTS),
    st.sampled_from(STEP_PHASES),
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
        ("kill", "host1@snyc:1", ("--kill host1@snyc:1 cannot work", "snyc is not a phase", "nearest is sync")),
        ("cut", "host1@start_engine:1", ("--cut host1@start_engine:1", "leave the step out")),
        ("kill", "host1@meet", ("--kill host1@meet", "use a later phase")),
    ],
)
def test_a_mistake_is_named(kind: Literal["cut", "kill"], text: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        host_fault(kind, text, HOSTS)
    assert all(fact in str(raised.value) for fact in facts)
