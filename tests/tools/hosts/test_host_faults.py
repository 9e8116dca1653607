import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.hosts.host_plan import HostFault, host_fault, quantity, skew

HOSTS = ("host0", "host1")


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1.5s", 1.5), ("250us", 0.00025), ("2min", 120.0)])
def test_durations(text: str, seconds: float) -> None:
    assert quantity("--latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 1e9), ("100Mbit", 1e8), ("64kbit", 64e3), ("5bit", 5.0)])
def test_rates(text: str, bits: float) -> None:
    assert quantity("--bandwidth", text) == bits


@pytest.mark.parametrize("percent", ["0", "0.5", "57", "100"])
def test_percent_is_a_fraction(percent: str) -> None:
    assert quantity("--loss", f"{percent}%") == pytest.approx(float(percent) / 100)


@given(
    st.sampled_from(("cut", "kill")),
    st.sampled_from(HOSTS),
    st.from_regex(r"[a-z][a-z_]*", fullmatch=True),
    st.none() | st.integers(0, 10**6),
)
def test_a_fault_at_a_phase_reads_as_it_was_written(kind: str, host: str, phase: str, step: int | None) -> None:
    when = phase if step is None else f"{phase}:{step}"
    read = host_fault(kind, f"{host}@{when}", HOSTS)  # type: ignore[arg-type]
    assert read == HostFault(kind, host, phase, step)  # type: ignore[arg-type]


def test_a_fault_after_a_time() -> None:
    assert host_fault("kill", "host1@12s", HOSTS) == HostFault("kill", "host1", seconds=12.0)


@pytest.mark.parametrize(("text", "offset"), [("host1=+90s", 90.0), ("host0=-5min", -300.0)])
def test_skews(text: str, offset: float) -> None:
    assert skew(text, HOSTS) == (text[:5], offset)


@pytest.mark.parametrize(
    ("parse", "facts"),
    [
        (lambda: quantity("--latency", "20"), ("--latency", '"20"', "us, ms, s or min")),
        (lambda: quantity("--bandwidth", "0gbit"), ("--bandwidth", '"0gbit"', "at least 1bit")),
        (lambda: quantity("--bandwidth", "1g"), ("--bandwidth", '"1g"')),
        (lambda: quantity("--loss", "101%"), ("--loss", '"101%"')),
        (lambda: quantity("--loss", "0.01"), ("--loss", '"0.01"')),
        (lambda: host_fault("cut", "host2@sync", HOSTS), ("--cut", '"host2@sync"', "host0, host1")),
        (lambda: host_fault("cut", "host1", HOSTS), ("--cut", '"host1"', "host1@PHASE")),
        (lambda: host_fault("kill", "host1@", HOSTS), ("--kill", '"host1@"')),
        (lambda: host_fault("kill", "host1@sync:x", HOSTS), ("--kill", "host1@sync:1 or host1@12s")),
        (lambda: skew("host1=90s", HOSTS), ("--skew", '"host1=90s"', "sign")),
        (lambda: skew("host1", HOSTS), ("--skew", '"host1"')),
        (lambda: skew("here=+1s", HOSTS), ("--skew", '"here=+1s"', "host0, host1")),
    ],
)
def test_a_mistake_is_named(parse: object, facts: tuple[str, ...]) -> None:
    assert callable(parse)
    with pytest.raises(ValueError) as raised:
        parse()
    assert all(fact in str(raised.value) for fact in facts)
