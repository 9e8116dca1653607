"""What launch/verify.py is asked: options, checked as far as it can be without a server and without torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from harness.config.layers import ConfigError
from harness.tools.engine_class.checkpoint_headers import read_headers
from harness.tools.preflight import check_index, check_safetensors
from harness.tools.user_sender import FUNCTION

SERVED = "give the weights of the model that it serves."
"""What to do about weights of another model than the server's."""
RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(kw_only=True)
class Options:
    """--server and --weights are needed; the server itself is asked for all else."""

    server: str = ""
    """Address of a running SGLang server, such as http://10.0.0.5:30000."""
    weights: str = ""
    """What its ranks must hold: a folder with config.json and safetensors, or MODULE:FUNCTION, which returns an iterator
    of (name, tensor), for example your own sender; MODULE is found from the current folder."""
    was: str = ""
    """A folder with the version before. A tensor that differs may then be told to be that version's."""
    model: str = ""
    """A folder with the config.json of the model, if --weights is a function and the path that the server was started
    with is not there on this machine."""
    ranks: str = ""
    """Only these ranks of the engine, such as 0,8-15."""
    layers: str = ""
    """Only these decoder layers, such as 0-3, and what is outside of them."""
    release: bool = False
    """Install the server's release of SGLang, as launch/bisect_versions.py does, and predict with that one. Otherwise
    the installed one predicts, and it is said if the server has another."""
    api_key_file: str = ""
    """A file that holds the server's API key."""
    seconds: float = 1800.0
    """How long the server may take to hash its weights."""
    json: str = ""
    """Write what was found there too."""


def check(options: Options) -> None:
    """Raise ConfigError for what is wrong with the options on any machine, or with the folders that they name."""
    if not options.server:
        raise ConfigError("--server is missing; give the address of a running SGLang server, such as http://HOST:PORT.")
    if not options.weights:
        raise ConfigError("--weights is missing; give a folder with config.json and safetensors, or MODULE:FUNCTION.")
    numbers_of("--ranks", options.ranks)
    numbers_of("--layers", options.layers)
    if not is_sender(options.weights):
        check_folder("--weights", Path(options.weights), config=not options.model)
    if options.was:
        check_folder("--was", Path(options.was), config=False)
        if not is_sender(options.weights) and Path(options.was).samefile(options.weights):
            raise ConfigError(f"--was {options.was} is --weights itself; give the folder of the version before.")
    if options.model and not (Path(options.model) / "config.json").is_file():
        raise ConfigError(f"--model {options.model} must be a folder with a config.json.")


def is_sender(weights: str) -> bool:
    """Return whether --weights names a function."""
    return FUNCTION.fullmatch(weights) is not None and not Path(weights).exists()


def check_folder(option: str, folder: Path, config: bool) -> None:
    """Raise ConfigError unless a folder holds a whole checkpoint in safetensors, and a config.json if there must be
    one.
    """
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder} is no folder; give one with config.json and safetensors files.")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{option} {folder} has no *.safetensors; give a folder that has the weights.")
    check_index(folder)
    for file in files:
        check_safetensors(file)
    if not read_headers(folder):  # which refuses an adapter
        raise ConfigError(f"{option} {folder} has safetensors without any tensor; give a folder that has the weights.")
    if config and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{option} {folder} has no config.json; copy the model's there, or name its folder by --model."
        )


def numbers_of(option: str, text: str) -> frozenset[int] | None:
    """Return the numbers of "0,2-4"; None for "", which stands for all. Raise ConfigError."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        match = RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"{option} must be numbers such as 0,2-4, got {text}.")
        found |= {*range(first, last + 1)}
    return frozenset(found) if text else None
