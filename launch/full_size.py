"""Ask whether a model's weights would arrive at its true size, with SGLang's and transformers' own classes and no GPU.

    python3 launch/full_size.py deepseek_v3 --tp 16
    python3 launch/full_size.py kimi_k2 --tp 16 --ep 16
    python3 launch/full_size.py FOLDER_WITH_CONFIG_JSON --tp 8 --pp 2 --json found.json --page found.html
    python3 launch/full_size.py qwen3_30b_a3b --tp 4 --against 0.5.17       what differs between two releases of SGLang
    python3 launch/full_size.py FOLDER --tp 8 --names model.safetensors.index.json    what somebody's own exporter sends
    python3 launch/full_size.py deepseek_v3_bf16 --tp 16 --nnodes 32
    python3 launch/full_size.py configs/multinode/deepseek_v3_671b.toml

MODEL is a folder with a config.json, or the name of a folder of configs/models. SGLang's class is built for each rank
of one engine on the meta device, which has no memory, under process groups that send nothing. It gets every name of the
checkpoint that transformers' class would save, through its own load_weights. Exit codes: 0 every name arrives whole and
fills every parameter; 1 something does not, and the first names are printed, or SGLang cannot build the model in this
way; with --against 1 if what arrives differs; 2 the command line, or the model's config.json, is wrong; 125 this
release of SGLang, or transformers, cannot answer, or not without a GPU.
"""

import sys

import _checkout

_checkout.use()

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import environments
from harness.tools.command_line import exit_with, read_known_options, unknown_option
from harness.tools.full_size.command import run
from harness.tools.full_size.model_and_options import Options


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        options, rest = read_known_options(Options, "launch/full_size.py MODEL", __doc__ or "", arguments)
        if not rest or rest[0].startswith("-") or (len(rest) > 1 and not rest[1].startswith("-")):
            raise ConfigError(
                f"give one MODEL first, and options as --help lists them; got {' '.join(rest) or 'none'}."
            )
        if wrong := [word for word in rest[1:] if word.startswith("--") and "." not in word.partition("=")[0]]:
            raise unknown_option(Options, wrong[0], "--help lists what there is")
        environments.need("sglang", "transformers")
        return run(rest[0], options, rest[1:])
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
