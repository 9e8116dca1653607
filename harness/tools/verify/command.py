"""What launch/verify.py does: ask a server what its ranks hold, predict it, compare, and say why it differs."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError
from harness.config.model_fields import fields_of_file, json_object
from harness.rollout.sglang_api.probe import installed
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.runtime.fork_server import collecting_nothing
from harness.tools.environments import REPOSITORY
from harness.tools.full_size.command import check_written, prepare_import
from harness.tools.verify.http_api import read_key, shown
from harness.tools.verify.question import SERVED, Options, check, is_sender, numbers_of
from harness.tools.verify.server import TARGET, Server, ask_server

SCRIPT, CONFIG = "launch/verify.py", "config.json"
SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts",
)  # fmt: skip
"""Of config.json: what a server and the checkpoint must have in common."""


def run(options: Options, words: Sequence[str]) -> int:
    """Print the verdict and return the exit code. words: the command line.

    Raise ConfigError, UnsupportedEnvironment.
    """
    check(options)
    if options.json:
        check_written("--json", Path(options.json))
    key = read_key(options.api_key_file) if options.api_key_file else ""
    with working(f"asking {shown(options.server)} for the hashes of its weights"):
        server = ask_server(options.server, key, options.seconds)
    _check_predictable(server)
    _check_ranks(server, options)
    folder = _model_folder(options, server)
    _check_same_model(server, folder)
    if options.release and server.release not in ("", installed("sglang").version()):
        return _with_release(server.release, words)
    with working("importing torch and SGLang's class of this model", importing=True), collecting_nothing():
        prepare_import(folder, any(each.role != TARGET for each in server.ranks))
        from harness.tools.engine_class import meta_model
        from harness.tools.verify.examination import examine

        meta_model.import_all(folder)
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        answer = examine(options, server, key, folder, Path(scratch))
    if options.json:
        Path(options.json).write_text(json.dumps(answer.table(), indent=1))
    for line in answer.lines():
        print(line)
    if mistake := answer.mistake or (answer.different and other_sizes(server, folder)):
        raise ConfigError(mistake)
    print(f"VERDICT: {answer.verdict()}")
    return answer.code


def _with_release(release: str, words: Sequence[str]) -> int:
    """Do the same with another release of SGLang, and return its exit code."""
    from harness.tools.trial.environment import of_release, run_script

    print(f"the server has sglang {release}; installing it, to predict with it", flush=True)
    asked = [word for word in words if word != "--release"]
    return run_script(of_release(release), [str(REPOSITORY / SCRIPT), *asked]).returncode


def _check_predictable(server: Server) -> None:
    """Raise UnsupportedEnvironment for a server whose weights cannot be predicted from outside."""
    if server.arguments.get("enable_eplb"):
        raise UnsupportedEnvironment(
            f"{server.url} moves experts between its ranks while it serves (--enable-eplb), so nobody outside knows which"
            " rank must hold which; start it without that."
        )


def _check_ranks(server: Server, options: Options) -> None:
    """Raise ConfigError if --ranks names one that the server does not tell about."""
    told = sorted({each.rank for each in server.ranks})
    if absent := sorted((numbers_of("--ranks", options.ranks) or set()) - set(told)):
        raise ConfigError(
            f"--ranks {options.ranks}: {server.url} tells nothing about rank {absent[0]}; it tells about"
            f" {', '.join(map(str, told))}."
        )


def _model_folder(options: Options, server: Server) -> Path:
    """Return the folder with the model's config.json. Raise ConfigError if there is none on this machine."""
    if options.model:
        return Path(options.model)
    if not is_sender(options.weights):
        return Path(options.weights)
    path = server.arguments.get("model_path")
    if isinstance(path, str) and (Path(path) / CONFIG).is_file():
        return Path(path)
    raise ConfigError(
        f"{shown(path)}, which {server.url} was started with, is no folder with a config.json here; name one by --model."
    )


def _check_same_model(server: Server, folder: Path) -> None:
    """Raise ConfigError if the server says that it serves another architecture."""
    ours, theirs = json_object(folder / CONFIG).get("architectures") or [], server.architectures
    if theirs and ours and not {*theirs} & {*ours}:
        raise ConfigError(
            f"{server.url} serves {', '.join(theirs)}, and {folder} is {shown(', '.join(map(str, ours)))}; {SERVED}"
        )


def other_sizes(server: Server, folder: Path) -> str:
    """Return that the server was started from a model of other sizes; "" if that is not known, or not so.

    A server does not tell its sizes. They are those of the path that it was started with, if that is on this machine
    too.
    """
    path = server.arguments.get("model_path")
    if not isinstance(path, str) or server.arguments.get("json_model_override_args") not in ("{}", "", None):
        return ""
    here, there = _sizes(json_object(folder / CONFIG)), _sizes(fields_of_file(path, CONFIG, download=False))
    unlike = [name for name in SIZES if name in here and name in there and here[name] != there[name]]
    sizes = ", ".join(f"{name} is {there[name]} there and {here[name]} here" for name in unlike)
    return f"{shown(path)}, which {server.url} was started with, is not {folder}: {sizes}; {SERVED}" if unlike else ""


def _sizes(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that a config.json has; of a multi-modal model those of its language part."""
    inner = fields.get("text_config")
    fields = {**fields, **inner} if isinstance(inner, dict) else fields
    return {name: fields[name] for name in SIZES if type(fields.get(name)) is int}
