"""GSM8K or MATH as train.parquet and test.parquet, in the schema of verl's examples.

    python launch/prepare_data.py gsm8k OUT [--source FOLDER]
    python launch/prepare_data.py math OUT [--source FOLDER]

Reads openai/gsm8k or DigitalLearningGmbH/MATH-lighteval from the hub, or a folder with train and test as jsonl or parquet.
Then: --task.source OUT --task.reward data_source. Exit codes: 0 written, 2 the command line or a row is wrong.
"""

import sys
from pathlib import Path

import _checkout

_checkout.use()

from harness.runtime.errors import report_user_error
from harness.tools import environments
from harness.tools.command_line import Parser, exit_with


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    environments.need("datasets", "pyarrow")
    from harness.tools.prepare_data import RECIPES, prepare

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("dataset", choices=RECIPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", default="")
    try:
        given = parser.parse_args(arguments)
        counts = prepare(given.dataset, given.out.expanduser(), given.source)
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    for split, rows in counts.items():
        print(f"{given.out / split}.parquet: {rows} rows")
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
