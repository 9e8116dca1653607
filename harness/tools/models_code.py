"""Python code of a model that SGLang would import without being trusted with it, found before anything is imported.

transformers, and most of SGLang, ask trust_remote_code first. Two places of SGLang do not, as of 0.5.23: what auto_map
names is imported for an architecture of which SGLang has no class (resolve_transformers_arch in
srt/model_loader/utils.py), and the code of a processor, where transformers cannot make it (_build_processor_manually in
srt/utils/hf_transformers/processor.py). With a class of its own SGLang imports nothing, so a published DeepSeek-V3,
whose config.json has an auto_map, is no such model.
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.config.model_fields import fields_of_file
from harness.config.schema import TINY_MODELS, Config
from harness.rollout.sglang_api.probe import SourceTree, installed

DRAFT, TOKENIZER = "engine.args.speculative_draft_model_path", "engine.args.tokenizer_path"
PROCESSOR = "AutoProcessor"


def unasked_code(config: Config, *, download: bool = False) -> dict[str, str]:
    """Return why SGLang would run Python code of a model unasked, as part of a sentence, by the key that names the
    model.

    Without an installed sglang, architectures are not looked up. download: whether files of a hub's model may be
    fetched. Raise ConfigError for a file that is no JSON object.
    """
    tree = installed("sglang") if find_spec("sglang") else None
    names = {key: config.engine.args.get(key.removeprefix("engine.args.")) for key in (DRAFT, TOKENIZER)}
    found = dict[str, str]()
    for key, name in {"model.name": config.model.name, **names}.items():
        if not name or name in TINY_MODELS:
            continue
        fields = fields_of_file(name, "config.json", download=download)
        code = named_code(fields)
        of_processor = named_code(fields_of_file(name, "preprocessor_config.json", download=download))
        if processor := (of_processor | code).get(PROCESSOR):
            found[key] = f"it names Python code for its processor ({processor}), which SGLang may import unasked"
        elif code and tree and key != TOKENIZER and (without := without_class(fields, tree)):
            found[key] = (
                f"its config.json names Python code ({next(iter(code.values()))}), which sglang {tree.version()} would import"
                f" unasked, because it has no class of its own for {without}"
            )
    return found


def named_code(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of every auto_map in a model's JSON file, those of its language model too: "MODULE.CLASS" by
    auto class.
    """
    found, tables = dict[str, str](), [fields]
    while tables:
        table = tables.pop()
        named = table.get("auto_map")
        found |= {str(kind): str(name) for kind, name in named.items()} if isinstance(named, Mapping) else {}
        tables += [each for each in table.values() if isinstance(each, Mapping)]
    return found


def without_class(fields: Mapping[str, Any], tree: SourceTree) -> str:
    """Return the architectures of a config.json if SGLang has no class for any of them, or "this model"; otherwise
    "".
    """
    wanted = [str(each) for each in fields.get("architectures") or ()]
    known = frozenset[str]().union(*model_classes(tree).values())
    return "" if known.intersection(wanted) else " or ".join(wanted) or "this model"


def model_classes(tree: SourceTree) -> dict[Path, frozenset[str]]:
    """Return the architectures that each file of SGLang's models offers to its registry.

    A file that cannot be imported on this machine offers none when SGLang runs.
    """
    files = sorted((tree.root / "srt" / "models").glob("*.py"))
    return {file: entry_classes(file.read_text(encoding="utf-8")) for file in files}


def entry_classes(text: str) -> frozenset[str]:
    """Return the classes that the text of a file of SGLang's models names as its EntryClass."""
    found = re.search(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|\w+)", text, re.MULTILINE)
    return frozenset(re.findall(r"\w+", found[1])) if found else frozenset()
