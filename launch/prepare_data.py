"""Write GSM8K or MATH in the schema of verl's examples, or two-digit additions for a training that succeeds on a
laptop.

    python launch/prepare_data.py gsm8k OUT [--source FOLDER]
    python launch/prepare_data.py math OUT [--source FOLDER]
    python launch/prepare_data.py addition OUT [--seed 0] [--updates 75]

gsm8k and math read the hub, or a folder with train and test as jsonl or parquet, and write train.parquet and
test.parquet; then use --task.source OUT --task.reward data_source. addition writes train.jsonl, test.jsonl and a tiny
model after a few supervised updates, for configs/cpu/addition.toml. Exit codes: 0 written, 2 the command line or a row
is wrong.
"""

import sys
from pathlib import Path

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.runtime.installed import as_typed
from harness.tools import environments
from harness.tools.command_line import Parser, exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(as_typed(__doc__))
        return 0
    from harness.tools.prepare_data import RECIPES, prepare, prepare_addition, save_supervised_start

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("dataset", choices=(*RECIPES, "addition"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=75)
    try:
        given = parser.parse_args(arguments)
        out = given.out.expanduser()
        if given.updates < 1:
            raise ValueError(f"--updates must be at least 1, got {given.updates}.")
        if given.dataset == "addition":
            environments.need("torch", "transformers")
            print(", ".join(f"{out / split}.jsonl: {rows} rows" for split, rows in prepare_addition(out).items()))
            loss = save_supervised_start(out / "model", out / "train.jsonl", given.seed, given.updates)
            print(f"{out / 'model'}: a tiny model after {given.updates} supervised updates, loss {loss:.2f}")
            return 0
        environments.need("datasets", "pyarrow")
        counts = prepare(given.dataset, out, given.source)
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    for split, rows in counts.items():
        print(f"{given.out / split}.parquet: {rows} rows")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
