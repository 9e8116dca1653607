"""What SGLang's model classes ask for while they are imported and built, and a machine without a GPU lacks.

Nothing here computes: it lets a class be built on the meta device whose forward pass needs a GPU or a kernel.
"""

import ast
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch

KERNELS = "torch.ops.sgl_kernel"
WARM_UPS = ("_prewarm_mhc_kernels", "_prewarm_mhc_pre_kernels")
"""Methods of DeepSeek-V4's class that compile kernels of tilelang; the second name is that of SGLang 0.5.16."""
_ABSENT = re.compile(
    r"is not installed|not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|No module named|sgl_kernel|^NameError"
)
_HARDWARE = r"\b(CUDA|ROCm|[GNX]PUs?|SM ?\d+|NVIDIA|AMD|Ascend|Hopper|Blackwell)\b"
_WANTS_HARDWARE = re.compile(
    rf"\b(requires?|needs?|only|supported)\b.*{_HARDWARE}|{_HARDWARE}.*\b(only|required)\b", re.DOTALL
)
"""A sentence of SGLang's about hardware that is not here."""
_ASKS_FOR_HARDWARE = re.compile(r"is_(cuda|cpu|hip|npu|xpu|musa)|platform")
"""A condition in SGLang's source whose answer depends on the hardware."""


def tells_what_is_absent(message: str) -> bool:
    """Return whether an error of SGLang's says that a GPU, or a package of kernels for it, is absent.

    message: with the error's type. A name that is not defined is one that SGLang imports on a GPU alone.
    """
    return bool(_ABSENT.search(message))


def is_for_hardware(error: Exception) -> bool:
    """Return whether SGLang raised an error because this is a machine without a GPU, and not because of the model.

    Its words tell, or the conditions that the line which raised it stands under.
    """
    said = f"{type(error).__name__}: {error}"
    if tells_what_is_absent(said) or _WANTS_HARDWARE.search(said):
        return True
    raised = traceback.extract_tb(error.__traceback__)[-1]
    if "/sglang/srt/" not in raised.filename or raised.lineno is None:
        return False
    tree = ast.parse(Path(raised.filename).read_text(encoding="utf-8"))
    above = (node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert))
    tests = [ast.unparse(each.test) for each in above if each.lineno <= raised.lineno <= (each.end_lineno or 0)]
    return any(map(_ASKS_FOR_HARDWARE.search, tests))


@dataclass(frozen=True)
class AssumedGpu:
    """The GPU whose properties SGLang is told when it asks, and what it asked for."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    asked: set[str] = field(default_factory=set)
    """The functions of torch.cuda that were called."""

    def answer(self) -> None:
        """Answer for the life of this process, if torch has no GPU."""
        if torch.cuda.is_available():
            return
        major, minor = self.capability
        properties = SimpleNamespace(
            name=self.name, major=major, minor=minor, multi_processor_count=self.multiprocessors
        )
        answers = {"get_device_properties": properties, "get_device_capability": self.capability, "current_device": 0}
        for function, value in answers.items():
            patch.object(torch.cuda, function, self._answering(function, value)).start()
        # Some loaders move what they are given to the GPU; here it stays where it is.
        patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor).start()
        self._answer_for_platform()

    def _answer_for_platform(self) -> None:
        """Answer what SGLang asks functions and flags of its own, of which its modules keep what they were told as they
        were imported: which class a quantization has, how a loader pads, what may be asked for.

        The flags of other modules stay: with them SGLang computes, by kernels that are not here.
        """
        major, minor = self.capability
        context = sys.modules.get("sglang.srt.runtime_context")
        if context is not None and hasattr(context, "override_platform"):  # older releases ask their functions alone
            on_hopper = {"is_cuda": True, "is_sm90": True, "is_hopper_with_cuda_12_3": True, "has_amx": False}
            context.override_platform(
                **on_hopper, device_sm=10 * major + minor, device_capability=self.capability
            ).install()
        of_packages: dict[str, dict[str, Any]] = {
            "sglang.srt.models.": {"_is_cpu": False},
            "sglang.srt.layers.quantization.awq": {"_is_cuda": True},
            "sglang.srt.layers.quantization.": {
                "is_cuda": lambda: True,
                "get_device_capability": self._answering("get_device_capability", self.capability),
            },
        }
        for package, answers in of_packages.items():
            for module in [each for name, each in sys.modules.items() if name.startswith(package)]:
                for name in answers.keys() & vars(module).keys():
                    patch.object(module, name, answers[name]).start()

    def _answering(self, function: str, value: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            self.asked.add(function)
            return value

        return call


def shapes_of_gpu(config: Any) -> None:
    """Have SGLang build what a GPU would hold where its CPU mode differs in more than kernels.

    config: transformers' config, changed in place. In CPU mode SGLang reads the numbers of linear attention's heads
    from fields that it pads for CPUs, and its rotary embedding, which has no weights, knows DeepSeek-V3's kind only.
    """
    for each in {id(part): part for part in (config, getattr(config, "text_config", config))}.values():
        for heads in ("linear_num_key_heads", "linear_num_value_heads"):
            if hasattr(each, heads):
                setattr(each, f"{heads}_cpu", getattr(each, heads))
    rotary = importlib.import_module("sglang.srt.layers.rotary_embedding")
    if hasattr(rotary, "__path__"):  # one file until it became a package
        rotary = importlib.import_module(f"{rotary.__name__}.factory")
    if hasattr(rotary, "get_rope_cpu"):
        patch.object(rotary, "get_rope_cpu", lambda *arguments: rotary.get_rope(*arguments[:-1])).start()


def without_warm_up(model: Any) -> None:
    """Leave out what SGLang's load_weights does last for some classes: it compiles kernels, which writes no weights."""
    for name in WARM_UPS:
        if hasattr(model, name):
            setattr(model, name, lambda: None)


def mxfp4_of_gpu() -> None:
    """Have SGLang know MXFP4, and pad experts in it, as on a GPU with triton_kernels, which its kernels for NVIDIA GPUs
    bring.

    Some releases register MXFP4 for GPUs alone. Without the padding SGLang's loader fails in CPU mode where sizes do
    not divide, as those of gpt-oss do not by 8. In bfloat16 a GPU's triton_kernels has the same experts transposed,
    which the loader of the CPU mode does not know. Call it once SGLang's modules are imported.
    """
    mxfp4 = sys.modules.get("sglang.srt.layers.quantization.mxfp4")
    if mxfp4 is not None and hasattr(mxfp4, "has_triton_kernels"):
        patch.object(mxfp4, "has_triton_kernels", True).start()
    methods = getattr(sys.modules.get("sglang.srt.layers.quantization"), "QUANTIZATION_METHODS", None)
    if mxfp4 is not None and methods is not None:
        methods.setdefault("mxfp4", mxfp4.Mxfp4Config)


def define_kernels(models: Path) -> None:
    """Give each kernel that a file of SGLang's models takes while it is imported a name, if it is not installed.

    models: the folder of these files. Without the name the import fails, and SGLang takes a class of transformers
    instead. Kernels that a file only asks for later stay absent, because SGLang looks whether it has them.
    """
    for file in sorted(models.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for name in taken_at_import(text) if KERNELS in text else ():
            if not hasattr(torch.ops.sgl_kernel, name):
                setattr(torch.ops.sgl_kernel, name, _absent(name))


def taken_at_import(text: str) -> Iterator[str]:
    """Yield the names of the kernels that a file takes outside of functions and classes."""
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == KERNELS:
            yield node.attr
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{KERNELS}.{name} is not installed; launch/full_size.py only builds and loads models"
        )

    return call
