import time

import pytest

from harness.runtime import events
from harness.runtime.events import current_work


class Voice:
    def __init__(self) -> None:
        self.spoke, self.said = 0.0, list[str]()

    def say(self, text: str) -> None:
        self.spoke = time.monotonic()
        self.said.append(text)


def wait_for(voice: Voice, text: str) -> None:
    until = time.monotonic() + 60
    while not any(text in line for line in voice.said):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_innermost_work_is_named_while_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_SECONDS", 0.05)
    voice = Voice()
    with events.working("outer", voice) as outer:
        wait_for(voice, "outer (0 s so far)")
        with events.working("inner"):
            wait_for(voice, "inner")
            work = current_work()
            assert work is not None and work.what == "inner"
        voice.said.clear()
        outer.what = "2 of 3"
        wait_for(voice, "2 of 3")
    said = len(voice.said)
    assert current_work() is None
    time.sleep(0.2)
    assert len(voice.said) == said


def test_a_short_work_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with events.working("short"):
        pass
    assert capfd.readouterr() == ("", "")


def test_the_lines_go_where_standard_error_went(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EVERY_SECONDS", 0.02)
    said = ""
    until = time.monotonic() + 60
    with events.working("long"):
        while "long (0 s so far)" not in said:
            assert time.monotonic() < until
            out, error = capfd.readouterr()
            said += error
            assert out == ""
