"""launch/ppo.py with one fault: every sync after the first does nothing, and says nothing. For tests only."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def do_nothing_after_the_first() -> None:
    """Let WeightSync.update_engine return at once from its second call on."""
    from harness.runtime.cpu_standins import activate

    activate()
    from harness.weights.sync import WeightSync

    update_engine = WeightSync.update_engine

    def update_once(self: WeightSync) -> None:
        if not self.loader.coverage:  # traced at the first sync
            update_engine(self)

    WeightSync.update_engine = update_once  # type: ignore[method-assign]


if __name__ == "__main__":
    from harness.run import run
    from harness.runtime.fork_server import ForkServer
    from harness.tools.command_line import parse
    from harness.tools.observers import standard_observers

    config = parse(sys.argv[1:]).config
    do_nothing_after_the_first()
    sys.exit(run(config, standard_observers(config), servers=ForkServer.handed_over()))
