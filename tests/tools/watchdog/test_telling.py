"""What people read."""

import pytest

from harness.tools.watchdog.failure import Failure, Place
from harness.tools.watchdog.telling import View, sentence, tell

IN_SYNC = Place(9, "sync", 1, True)
EARLIER = Place(8, "resume_weights", 1, False)
HOSTS = {0: "host0", 1: "host0", 2: "host1", 3: "host1"}
NOON = 1_700_049_600.0  # 12:00:00 UTC


def view(*places: Place) -> View:
    return View(now=NOON + 10.24, world_size=4, places=dict(enumerate(places)), hosts=HOSTS)


def failed(**values: object) -> Failure:
    given = {"kind": "deadline", "time": NOON, "host": "host0", "ranks": (0,), "place": IN_SYNC, "seconds": 60.0}
    return Failure(**given | values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "places", "said"),
    [
        (
            failed(kind="lost", host="host1", ranks=(2, 3)),
            [IN_SYNC] * 4,
            "host1 (ranks 2, 3) is gone: last heard 12:00:00 UTC, 10.2 s ago, when its ranks were in sync of step 1",
        ),
        (
            failed(kind="lost", host="host1", ranks=(2, 3)),
            [IN_SYNC, IN_SYNC, IN_SYNC, EARLIER],
            "host1 (ranks 2, 3) is gone: last heard 12:00:00 UTC, 10.2 s ago, when rank 2 was in sync of step 1 and rank 3"
            " was after resume_weights of step 1",
        ),
        (
            failed(kind="died", host="host1", ranks=(3,), detail="was killed by SIGKILL"),
            [IN_SYNC] * 4,
            "rank 3 on host1 was killed by SIGKILL in sync of step 1 at 12:00:00 UTC",
        ),
        (
            failed(kind="died", ranks=(1,), detail="was killed by SIGKILL", asked="kill@sync:1:1"),
            [IN_SYNC] * 4,
            "rank 1 on host0 was killed by SIGKILL in sync of step 1 at 12:00:00 UTC, as asked: --inject kill@sync:1:1",
        ),
        (
            failed(kind="told", ranks=(0, 1), detail="(pid 7) got SIGINT, as from Ctrl-C,"),
            [IN_SYNC] * 4,
            "torchrun of ranks 0, 1 on host0 (pid 7) got SIGINT, as from Ctrl-C, at 12:00:00 UTC, when its ranks were in"
            " sync of step 1",
        ),
        (
            failed(kind="stopped", ranks=(0,), detail="engine process sglang::scheduler_TP1 (pid 7)"),
            [IN_SYNC] * 4,
            "engine process sglang::scheduler_TP1 (pid 7) of rank 0 on host0 was stopped in sync of step 1 (SIGSTOP, or a"
            " debugger): its deadline of 60 s passed at 12:00:00 UTC",
        ),
        (
            failed(),
            [IN_SYNC, IN_SYNC, EARLIER, IN_SYNC],
            "deadline of 60 s passed in sync of step 1: rank 2 on host1 had not arrived, but was after resume_weights of step 1"
            " (waited for by ranks 0, 1, 3)",
        ),
        (
            failed(),
            [IN_SYNC, IN_SYNC, Place(10, "sync", 1, False), Place(11, "generate", 1, True)],
            "deadline of 60 s passed in sync of step 1: ranks 0, 1 on host0 were still there (waited for by ranks 2, 3)",
        ),
        (
            failed(),
            [IN_SYNC] * 4,
            "deadline of 60 s passed in sync of step 1: all ranks (0, 1, 2, 3) are there, and none of them went on",
        ),
        (
            failed(),
            [IN_SYNC] * 2,
            "deadline of 60 s passed in sync of step 1: nothing was heard of ranks 2, 3 (waited for by ranks 0, 1)",
        ),
        (
            failed(place=Place(1, "", None, False)),
            [Place(1, "", None, False)] * 4,
            "deadline of 60 s passed before its first phase: all ranks (0, 1, 2, 3) are there, and none of them went on",
        ),
    ],
)
def test_a_failure_is_one_sentence(failure: Failure, places: list[Place], said: str) -> None:
    assert sentence(failure, view(*places)) == said


def test_a_lost_peer_is_the_cause_only_as_a_peer_that_vanished() -> None:
    echo = failed(kind="echo", ranks=(0,), detail="Connection closed by peer")
    first, *_ = tell([echo], view(IN_SYNC, IN_SYNC, IN_SYNC, EARLIER))
    assert first == (
        "FIRST FAILURE: a peer vanished: rank 3 last reported after resume_weights of step 1; rank 0 on host0 lost a peer in"
        " sync of step 1 at 12:00:00 UTC: Connection closed by peer"
    )


def test_consequences_follow_the_cause_and_are_folded() -> None:
    cause = failed(kind="exception", ranks=(3,), host="host1", detail="ValueError: no", time=NOON)
    echoes = [
        failed(kind="echo", ranks=(rank,), detail="Connection closed by peer", time=NOON + rank + 0.5)
        for rank in range(6)
    ]
    first, *rest = tell([*echoes, cause], view(*[IN_SYNC] * 4))
    assert first == "FIRST FAILURE: rank 3 on host1 failed in sync of step 1 at 12:00:00 UTC: ValueError: no"
    assert rest == [
        "  +0.5 to +5.5 s: ranks 0, 1, 2, 3, 4, 5 on host0 lost a peer in sync of step 1: Connection closed by peer"
    ]
