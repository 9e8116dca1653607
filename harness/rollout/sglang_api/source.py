"""Reading a Python package's source without importing it: what most probes of SGLang are made of.

Importing any module of sglang 0.5.20 takes 8 s, and its engine 15 s; reading the same facts from source takes under
one.
"""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterable
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
        """The class called `name` at the top level of the first of `paths` that has it."""
        for path in paths:
            for node in self.module(path).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
        return None

    def find_function(self, name: str, *paths: str) -> Function | None:
        """The first function or method called `name`, at any depth."""
        for path in paths:
            for node in ast.walk(self.module(path)):
                if isinstance(node, Function) and node.name == name:
                    return node
        return None

    def version(self) -> str:
        """The literal `__version__`, or "unknown"; for reports only, nothing may branch on it."""
        for path in ("_version.py", "version.py"):
            found = re.search(r"""^__version__\b[^'"\n]*=\s*['"]([^'"]+)['"]""", self.text(path), re.MULTILINE)
            if found:
                return found.group(1)
        return "unknown"


def installed(package: str) -> SourceTree:
    """The source of an installed top-level package, found without importing it.

    Raises ModuleNotFoundError when it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package} is not installed in this environment", name=package)
    return SourceTree(Path(spec.submodule_search_locations[0]))


def load(path: str, name: str) -> Any:
    """Import the module at `path` inside sglang and return its `name`: the one place where the harness imports
    sglang."""
    return getattr(importlib.import_module("sglang." + path.removesuffix(".py").replace("/", ".")), name)


def methods(cls: ast.ClassDef | None) -> dict[str, tuple[str, ...]]:
    """Method name -> its parameter names without self, in order, keyword-only ones last."""
    return {node.name: parameters(node) for node in (cls.body if cls else []) if isinstance(node, Function)}


def parameters(function: Function | None) -> tuple[str, ...]:
    """Parameter names of a function; without self or cls."""
    if function is None:
        return ()
    arguments = function.args
    names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    return tuple(name for name in names if name not in ("self", "cls"))


def annotated_fields(cls: ast.ClassDef | None) -> tuple[str, ...]:
    """Names of a class's public annotated fields, as dataclasses and msgspec see them; ClassVars left out."""
    nodes = [node for node in (cls.body if cls else []) if isinstance(node, ast.AnnAssign)]
    names = [node.target.id for node in nodes if isinstance(node.target, ast.Name) and not _is_classvar(node)]
    return tuple(name for name in names if not name.startswith("_"))


def string_assignments(module: ast.Module) -> dict[str, str]:
    """Module-level `NAME = "literal"`."""
    return {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def compared_literals(function: Function | None, name: str) -> tuple[str, ...]:
    """The string literals that a function compares the variable `name` with by ==, in source order."""
    found = []
    for node in ast.walk(function) if function else ():
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == name:
            found += [c.value for c in node.comparators if isinstance(c, ast.Constant) and isinstance(c.value, str)]
    return tuple(found)


def mentions(node: ast.AST | None, dotted: str) -> bool:
    """Whether an attribute chain such as `torch.cuda.synchronize`, or a suffix of a longer one, occurs below `node`."""
    nodes: Iterable[ast.AST] = ast.walk(node) if node else ()
    wanted = dotted.split(".")
    return any(
        dotted_name(n).split(".")[-len(wanted) :] == wanted for n in nodes if isinstance(n, ast.Attribute | ast.Name)
    )


def dotted_name(node: ast.AST) -> str:
    """a.b.c for an attribute chain over a name, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _is_classvar(node: ast.AnnAssign) -> bool:
    annotation = node.annotation.value if isinstance(node.annotation, ast.Subscript) else node.annotation
    return dotted_name(annotation).split(".")[-1] == "ClassVar"
