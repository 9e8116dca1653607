"""An engine with the memory saver cannot load a .bin checkpoint.

SGLang's loader called empty_cache() inside the saver's memory pool, which torch before 2.8 asserts against.
"""

from pathlib import Path

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="pytorch_model.bin",
    healthy="model.safetensors",
    signature=(r"captures_underway\.empty\(\)",),
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine(prepare=to_bin if broken else None) as engine:
        files = sorted(each.name for each in engine.folder.glob("*model*"))
        print("the engine has loaded", *files, flush=True)
        engine.print_difference(engine.trainer(seed=0))


def to_bin(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
