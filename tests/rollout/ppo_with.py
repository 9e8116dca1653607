"""ppo_with.py MODULE:CLASS WORD...: run by torchrun. PPO steps with this RolloutEngine, and ppo.py's command line."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.run import run
from harness.tools.command_line import parse
from harness.tools.observers import standard_observers

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    config = parse(sys.argv[2:]).config
    engine_class = getattr(importlib.import_module(module), name)
    raise SystemExit(run(config, standard_observers(config), engine_class=engine_class))
