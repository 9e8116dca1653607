"""launch/ppo.py with one fault: every sync after the first does nothing, and says nothing. For tests only."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def do_nothing_after_the_first() -> None:
    """Let WeightSync.push return at once from its second call on."""
    from harness.runtime.cpu_standins import activate

    activate()
    from harness.weights.sync import WeightSync

    push = WeightSync.push

    def push_once(self: WeightSync) -> None:
        if not self.link.coverage:  # traced at the first push
            push(self)

    WeightSync.push = push_once  # type: ignore[method-assign]


if __name__ == "__main__":
    from harness.run import run
    from harness.tools.command_line import parse
    from harness.tools.observers import standard_observers

    config = parse(sys.argv[1:]).config
    do_nothing_after_the_first()
    sys.exit(run(config, standard_observers(config)))
