"""Reading a Python package's source without importing it: what most probes of SGLang are made of.

Importing any module of sglang 0.5.20 takes 8 s, and its engine 15 s; reading the same facts from source takes under
one.
"""

import ast
import importlib
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceTree:
    """The folder of one package. Paths are relative to it; a file that is absent reads as empty."""

    root: Path
    _modules: dict[str, ast.Module] = field(default_factory=dict, repr=False, compare=False)

    def has(self, path: str) -> bool:
        return (self.root / path).is_file()

    def text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8") if self.has(path) else ""

    def module(self, path: str) -> ast.Module:
        if path not in self._modules:
            self._modules[path] = ast.parse(self.text(path))
        return self._modules[path]

    def find_class(self, name: str, *paths: str) -> ast.ClassDef | None:
        """Return the class called `name` at the top level of the first of `paths` that has it."""
        nodes = (node for path in paths for node in self.module(path).body)
        return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)

    def find_function(self, name: str, *paths: str) -> Function | None:
        """Return the first function or method called `name`, at any depth."""
        nodes = (node for path in paths for node in ast.walk(self.module(path)))
        return next((node for node in nodes if isinstance(node, Function) and node.name == name), None)

    def version(self) -> str:
        """Return the literal `__version__`, or "unknown"; for reports only, nothing may branch on it."""
        for path in ("_version.py", "version.py"):
            found = re.search(r"""^__version__\b[^'"\n]*=\s*['"]([^'"]+)['"]""", self.text(path), re.MULTILINE)
            if found:
                return found.group(1)
        return "unknown"


def installed(package: str) -> SourceTree:
    """Return the source of an installed top-level package, found without importing it.

    Raises ModuleNotFoundError when it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package} is not installed in this environment", name=package)
    return SourceTree(Path(spec.submodule_search_locations[0]))


def load(path: str, name: str) -> Any:
    """Import the module at `path` inside sglang and return its `name`: the one place where the harness imports sglang."""
    return getattr(importlib.import_module("sglang." + path.removesuffix(".py").replace("/", ".")), name)


def methods(cls: ast.ClassDef | None) -> dict[str, tuple[str, ...]]:
    """Return method name -> its parameter names without self, in order, keyword-only ones last."""
    return {node.name: parameters(node) for node in (cls.body if cls else []) if isinstance(node, Function)}


def parameters(function: Function | None) -> tuple[str, ...]:
    """Return the parameter names of a function, without self or cls."""
    arguments = function.args if function else ast.arguments([], [], None, [], [], None, [])
    names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    return tuple(name for name in names if name not in ("self", "cls"))


def annotations(cls: ast.ClassDef | None) -> dict[str, ast.expr]:
    """Return the annotations of a class's public fields, as dataclasses and msgspec see them; ClassVars left out."""
    return {
        node.target.id: node.annotation
        for node in (cls.body if cls else [])
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if not node.target.id.startswith("_") and not re.match(r"(\w+\.)*ClassVar\b", ast.unparse(node.annotation))
    }


def mentions(node: ast.AST | None, dotted: str) -> bool:
    """Return whether an attribute chain such as `torch.cuda.synchronize`, or a suffix of a longer one, occurs below."""
    chains = (ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Name)) if node else ()
    return any(f".{chain}".endswith(f".{dotted}") for chain in chains)
