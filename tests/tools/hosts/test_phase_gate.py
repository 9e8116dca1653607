import selectors
import socket
import threading
from pathlib import Path

import pytest

from harness.tools.hosts.phase_gate import EmulatedHost, PhaseServer


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.1):
        key.data()


@pytest.mark.parametrize("folder", ["short", 200 * "x"], ids=["short", "longer-than-an-address"])
def test_a_rank_waits_until_the_answer(tmp_path: Path, folder: str) -> None:
    selector = selectors.DefaultSelector()
    heard: list[tuple[str, int | None, bool]] = []
    path = tmp_path / folder / "phases"
    path.parent.mkdir()
    PhaseServer(path, selector, lambda phase, step: heard.append((phase, step, rank.is_alive())))
    begins = EmulatedHost(str(path), lambda: None).phase_begins

    def phases() -> None:
        begins("run", None)
        begins("sync", 1)

    rank = threading.Thread(target=phases)
    rank.start()
    rank.join(0.2)
    assert rank.is_alive()
    while rank.is_alive():
        turn(selector)
    assert heard == [("run", None, True), ("sync", 1, True)]


def test_a_rank_that_died_while_it_waited_does_not_hinder_the_next(tmp_path: Path) -> None:
    selector = selectors.DefaultSelector()
    heard: list[str] = []
    PhaseServer(tmp_path / "phases", selector, lambda phase, step: heard.append(phase))
    for words in (b"", b'["sync", 1]'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.connect(str(tmp_path / "phases"))
            if words:
                dead.send(words)
    for _ in range(10):
        turn(selector)
    assert heard == ["sync"]
    assert len(selector.get_map()) == 1


def test_a_launcher_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "phases"))
        listener.listen()
        begins = EmulatedHost(str(tmp_path / "phases"), lambda: None).phase_begins

        def hang_up() -> None:
            visitor, _ = listener.accept()
            visitor.recv(1024)
            visitor.close()

        threading.Thread(target=hang_up).start()
        with pytest.raises(ConnectionError, match="closed .* without an answer to phase sync"):
            begins("sync", 0)
