import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.hosts.harms import AfterSeconds, AtPhase, Harm, duration, fraction, harm, rate, skew

HOSTS = ("host0", "host1")


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1.5s", 1.5), ("250us", 0.00025), ("2min", 120.0)])
def test_durations(text: str, seconds: float) -> None:
    assert duration("--latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 1e9), ("100Mbit", 1e8), ("64kbit", 64e3), ("5bit", 5.0)])
def test_rates(text: str, bits: float) -> None:
    assert rate("--bandwidth", text) == bits


@given(st.integers(0, 100))
def test_percent_is_a_fraction(percent: int) -> None:
    assert fraction("--loss", f"{percent}%") == percent / 100


@given(
    st.sampled_from(("cut", "kill")),
    st.sampled_from(HOSTS),
    st.from_regex(r"[a-z][a-z_]*", fullmatch=True),
    st.none() | st.integers(0, 10**6),
)
def test_a_harm_at_a_phase_reads_as_it_was_written(kind: str, host: str, phase: str, step: int | None) -> None:
    when = phase if step is None else f"{phase}:{step}"
    read = harm(kind, f"{host}@{when}", HOSTS)  # type: ignore[arg-type]
    assert read == Harm(kind, host, AtPhase(phase, step))  # type: ignore[arg-type]
    assert isinstance(read.when, AtPhase)
    assert read.when.matches(phase, 3 if step is None else step)
    assert not read.when.matches(phase + "x", step)
    assert step is None or not read.when.matches(phase, step + 1)


def test_a_harm_after_a_time() -> None:
    assert harm("kill", "host1@12s", HOSTS) == Harm("kill", "host1", AfterSeconds(12.0))


@pytest.mark.parametrize(("text", "offset"), [("host1=+90s", 90.0), ("host0=-5min", -300.0)])
def test_skews(text: str, offset: float) -> None:
    assert skew(text, HOSTS) == (text[:5], offset)


@pytest.mark.parametrize(
    ("parse", "sentence"),
    [
        (lambda: duration("--latency", "20"), '--latency = "20" is no duration; give a number with us, ms, s, min'),
        (lambda: rate("--bandwidth", "0gbit"), '--bandwidth = "0gbit" is no bandwidth'),
        (lambda: rate("--bandwidth", "1g"), '--bandwidth = "1g" is no bandwidth'),
        (lambda: fraction("--loss", "101%"), '--loss = "101%" is no share'),
        (lambda: fraction("--loss", "0.01"), '--loss = "0.01" is no share'),
        (lambda: harm("cut", "host2@sync", HOSTS), 'the host "host2"; the hosts are host0, host1'),
        (lambda: harm("cut", "host1", HOSTS), '--cut = "host1" does not say when'),
        (lambda: harm("kill", "host1@", HOSTS), '--kill = "host1@" does not say when'),
        (lambda: harm("kill", "host1@sync:x", HOSTS), "such as host1@sync:1 or host1@12s"),
        (lambda: skew("host1=90s", HOSTS), '--skew = "host1=90s" has no offset with a sign'),
        (lambda: skew("host1", HOSTS), '--skew = "host1" has no offset'),
        (lambda: skew("here=+1s", HOSTS), 'the host "here"'),
    ],
)
def test_a_mistake_is_named(parse: object, sentence: str) -> None:
    assert callable(parse)
    with pytest.raises(ValueError) as raised:
        parse()
    assert sentence in str(raised.value)
