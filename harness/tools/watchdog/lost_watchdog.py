"""What a rank keeps of a run that has lost its watchdog and the standby of that."""

import threading
import time
from pathlib import Path


def keep_failure(
    folder: Path, host: str, rank: int, detail: str, place: tuple[str, int | None], seconds: float
) -> None:
    """Write the failure file of this host, where no other rank has; gives up after these seconds."""

    def keep() -> None:
        # Only now: a rank that ends well needs none of it.
        from harness.tools.watchdog.failure import Failure, Place
        from harness.tools.watchdog.telling import View
        from harness.tools.watchdog.verdict import Verdict

        if (folder / f"failure-{host}.json").exists():
            return
        now, at = time.time(), Place(0, *place, inside=True)
        failure = Failure(kind="watchdog", time=now, host=host, ranks=(rank,), place=at, detail=detail)
        Verdict(host, folder, [failure], View(now=now, world_size=0, places={rank: at}, hosts={rank: host})).keep()

    thread = threading.Thread(target=keep, name="failure", daemon=True)
    thread.start()
    thread.join(seconds)
