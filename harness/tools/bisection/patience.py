"""A lost network is waited for, longer each time, before a bisect pauses."""

import time
from dataclasses import dataclass

from harness.tools.bisection.show import Show
from harness.tools.bisection.store import Unreachable


@dataclass
class Patience:
    """Waits in a row, in seconds."""

    waits: tuple[float, ...]
    show: Show
    _used: int = 0

    def wait(self, problem: Unreachable) -> None:
        """Before what failed is tried again. Raises the problem where every wait in a row was in vain."""
        if self._used == len(self.waits):
            raise problem
        seconds = self.waits[self._used]
        self._used += 1
        self.show.say(f"{problem} Trying again in {seconds:.0f} s ({self._used} of {len(self.waits)} attempts)")
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.show.beat()
            time.sleep(min(0.5, left))

    def restart(self) -> None:
        """The network is there."""
        self._used = 0
