"""Engines of published models at their true widths: SGLang's classes and loaders on the meta device, as in
tools/full_size.

A case says which model, with how few layers, and what it sends; each rank of the engine is a process without a GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.runtime.errors import CANNOT_RUN_HERE, UnsupportedEnvironment
from harness.tools.environments import REPOSITORY
from harness.tools.full_size.model_and_options import SHIPPED

if TYPE_CHECKING:
    from harness.weights.fusing import FusingGroup
    from harness.weights.tensor_view import TensorView

BLOCK_FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
"""The quantization_config of checkpoints in DeepSeek's blocks of float8."""
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUPS_OF_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": _INT4}},
}
"""The quantization_config of checkpoints with a scale for each 32 columns of int4, without its "ignore"."""
SHOWN = 12
"""How many problems are printed."""


@contextmanager
def true_model(
    name: str, layers: int, language_fields: Mapping[str, Any] | None = None, **fields: Any
) -> Iterator[Path]:
    """Yield a folder with a model's config.json of configs/models, with so few layers, all else at its true size.

    fields: replace those of config.json; None leaves one out. language_fields: replace those of its text_config.
    """
    config = json.loads((SHIPPED / name / "config.json").read_text(encoding="utf-8"))
    language = config.get("text_config") or config
    whole = language["num_hidden_layers"]
    for key, value in language.items():
        if isinstance(value, list) and len(value) >= whole:  # it has an entry for each layer
            language[key] = value[:layers]
    language.update({"num_hidden_layers": layers, **(language_fields or {})})
    config = {key: value for key, value in (config | fields).items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def full_size(folder: Path, *options: object) -> None:
    """Run launch/full_size.py, and exit with its code. Raise UnsupportedEnvironment if it cannot answer here."""
    command = [sys.executable, str(REPOSITORY / "launch" / "full_size.py"), str(folder), *map(str, options)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode == CANNOT_RUN_HERE:
        raise UnsupportedEnvironment(done.stderr.strip().rpartition("\n")[2].removeprefix("error: "))
    sys.exit(done.returncode)


def import_sglang(folder: Path, draft: bool = False) -> None:
    """Import what check_engine and the names of a trainer need, as launch/full_size.py does, before anything imports
    torch.

    draft: also the class of the draft model.
    """
    from harness.tools.full_size.command import prepare_import

    prepare_import(folder, draft)
    from harness.tools.engine_class import meta_model

    meta_model.import_all(folder)


def checkpoint_tensor(name: str, dtype: Any, *shape: int) -> "TensorView":
    """Return a tensor that a checkpoint has and no class of transformers makes."""
    from harness.weights.tensor_view import TensorView

    return TensorView.whole(name, dtype, shape)


def check_engine(
    folder: Path, groups: "Sequence[FusingGroup]", *, tp: int, about: str = "", draft: bool = False, **arguments: Any
) -> None:
    """Build all ranks of an engine, give each group to their loaders in a call of its own, and print what does not
    arrive.

    groups: none to build the ranks alone. about: a regular expression; only tensors that it matches are looked at,
    because the groups are a part of the checkpoint. draft: build the draft model of speculative decoding instead.
    arguments: SGLang's server arguments. Exit with 1 if something does not arrive, or if SGLang cannot build a rank.
    """
    from harness.tools.engine_class.engine_answer import ask_engine
    from harness.tools.engine_class.traced_ranks import EngineShape, RankFailed

    shape = EngineShape(
        folder=folder, arguments={"tp_size": tp, "dtype": "bfloat16", **arguments}, tp=tp, pp=1, draft=draft
    )
    try:
        found = ask_engine(shape, groups, every_name=True)
    except RankFailed as error:
        sys.exit(f"the engine cannot be built: {error}")
    if not groups:
        print(f"SGLang builds all {len(found.ranks)} ranks")
        return
    problems = [each for each in found.findings if any(re.search(about, name) for name in each.every)]
    for problem in problems[:SHOWN]:
        print(problem)
    if problems:
        sys.exit(f"{len(problems)} problem(s), of which {min(SHOWN, len(problems))} are shown")
    sent = [view.name for group in groups for view in group.views if re.search(about, view.name)]
    if set(sent) <= set(found.untold):  # or there are none: then this proves nothing of this release
        raise UnsupportedEnvironment(
            f"none of the {len(sent)} tensors that {about!r} names can be followed through this SGLang's loaders"
        )
    print(f"{len(sent)} tensors arrive whole")
