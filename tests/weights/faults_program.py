"""faults_program.py NAME --run.dir FOLDER: on two ranks of torchrun, the cases of tests/weights/faults_<NAME>.py."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(name: str, folder: Path) -> None:

    import_module(f"tests.weights.faults_{name}").main(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[3]))
    from harness.runtime.processes import hard_exit

    hard_exit(0)
