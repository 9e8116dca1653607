"""Tell whether a running SGLang server holds the weights that a checkpoint, or a sender, says it must hold.

    python3 launch/verify.py --server http://HOST:30000 --weights FOLDER
    python3 launch/verify.py --server http://HOST:30000 --weights FOLDER --was FOLDER_OF_THE_VERSION_BEFORE
    python3 launch/verify.py --server http://HOST:30000 --weights my_sender:named_tensors

The server may be anybody's, on GPUs or a CPU; it is only asked for its arguments and for SGLang's own hashes of its
parameters, /weights_checker. What each rank must hold is predicted here, without a GPU: SGLang's class of the model is
built for that rank without memory, its own load_weights is traced, and what it would copy of the weights is hashed as
the server does it. Exit codes: 0 every tensor that can be compared is equal; 1 some are not, and which, on which ranks,
and why where that can be told; 2 the command line or the weights are wrong, or no such server answers; 125 the server
cannot be asked, is being updated, or cannot be predicted here.
"""

import sys

import _checkout

_checkout.use()

from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import environments
from harness.tools.command_line import exit_with, read_options
from harness.tools.verify.command import run
from harness.tools.verify.question import Options


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        options = read_options(Options, "launch/verify.py --server URL --weights FOLDER", __doc__ or "", arguments)
        environments.need("sglang", "transformers")
        return run(options, arguments)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
