"""SGLang misses fields in the config.json that transformers 5 writes for DeepSeek-V3."""

import json
from pathlib import Path

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="config.json as transformers 5 writes it",
    healthy="with moe_layer_freq, topk_method and scoring_func, as DeepSeek's own has them",
    signature=(r"AttributeError: .*'(moe_layer_freq|topk_method|scoring_func)'",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine("deepseek_v3", prepare=strip if broken else None) as engine:
        engine.generate()


def strip(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name in ("moe_layer_freq", "topk_method", "scoring_func"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
