import selectors
import socket
import threading
from pathlib import Path

import pytest

from harness.tools.hosts.phase_client import EmulatedHost
from harness.tools.hosts.phase_server import Door


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.1):
        key.data()


def test_a_rank_waits_until_the_answer(tmp_path: Path) -> None:
    selector = selectors.DefaultSelector()
    heard: list[tuple[str, int | None, bool]] = []
    Door(tmp_path / "phase_client", selector, lambda phase, step: heard.append((phase, step, rank.is_alive())))
    phase_client = EmulatedHost(str(tmp_path / "phase_client"), lambda: None).phase_begins

    def phases() -> None:
        phase_client("run", None)
        phase_client("sync", 1)

    rank = threading.Thread(target=phases)
    rank.start()
    rank.join(0.2)
    assert rank.is_alive()
    while rank.is_alive():
        turn(selector)
    assert heard == [("run", None, True), ("sync", 1, True)]


def test_a_rank_that_died_at_the_door_does_not_hinder_the_next(tmp_path: Path) -> None:
    selector = selectors.DefaultSelector()
    heard: list[str] = []
    Door(tmp_path / "phase_client", selector, lambda phase, step: heard.append(phase))
    for words in (b"", b'{"rank": 0, "phase": "syn', b'{"rank": 0, "host": "x", "phase": "sync", "step": 1}\n'):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.connect(str(tmp_path / "phase_client"))
            dead.sendall(words)
    for _ in range(10):
        turn(selector)
    assert heard == ["sync"]
    assert len(selector.get_map()) == 1


def test_a_launcher_that_is_gone_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "phase_client"))
        listener.listen()
        phase_client = EmulatedHost(str(tmp_path / "phase_client"), lambda: None).phase_begins

        def hang_up() -> None:
            visitor, _ = listener.accept()
            visitor.recv(1024)
            visitor.close()

        threading.Thread(target=hang_up).start()
        with pytest.raises(ConnectionError, match="closed .* without an answer to phase sync"):
            phase_client("sync", 0)
