"""The environment variables that SGLang's Engine sets in the process that builds it, and those that it obeys.

The Engine sets NCCL_CUMEM_ENABLE and others in os.environ, but only on the rank that builds it. NCCL communicators that
this rank makes later differ from those of its peers, and the trainer's next collective dies ("Cuda failure 'invalid
argument'"). So every rank gets the same values before its first collective.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.rollout.sglang_api.probe import ENGINE, SGLangApi, load

SET_ENVIRONMENT = "_set_envs_and_config"
MUST_AGREE = ("NCCL_", "TORCH_NCCL_", "CUDA_")
DISABLE_BALANCE = ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
ENABLE_BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"

VALUE = re.compile(r"'(?P<literal>.*)'|str\(int\((?P<truth>.*\w\.\w.*)\)\)")
"""A value that engine arguments alone decide: a constant, or str(int(args.a or args.b))."""
NEGATED = re.compile(r"not \w+\.(\w+)")


def memory_imbalance_environment() -> dict[str, str | None]:
    """Return what lets an engine start next to a trainer that already uses memory on some GPUs.

    None removes a variable.

    The old names must be absent: up to 0.5.17 SGLang copies the value of SGL_DISABLE_... into SGLANG_ENABLE_...
    unchanged, so that "disable = true" enables the check.
    """
    return {ENABLE_BALANCE: "0"} | dict.fromkeys(DISABLE_BALANCE)


def common_environment(api: SGLangApi, engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank needs in its environment before its first collective.

    These are the NCCL_*, TORCH_NCCL_* and CUDA_* values that the Engine will set on the rank that builds it, given
    that rank's `environ`. Values that depend on more than engine arguments (on hardware, say) are left out. Set them on
    every rank, also on the one that builds the engine: then 0.5.17 and newer keep NCCL_CUMEM_ENABLE = 0 in the one case
    where they would choose 1, an engine over several hosts of one NVLink fabric.

    Raises ValueError if this SGLang has no function that sets them: then nobody knows which ranks would disagree.
    """
    function = api.tree.find_function(SET_ENVIRONMENT, ENGINE)
    assignments = list(_assignments(function.body)) if function else []
    if not assignments:
        raise ValueError(
            f"sglang {api.version} has no function {SET_ENVIRONMENT} that assigns to os.environ: find where its Engine "
            "sets NCCL_* and CUDA_* variables, and give every rank the same ones."
        )
    found = {}
    for name, text, tests in assignments:
        keeps = any(name in test for test in tests)  # SGLang keeps a value that is set already
        skipped_by = [NEGATED.fullmatch(test) for test in tests if name not in test]
        value = VALUE.fullmatch(text)
        is_skipped = any(match is None or engine_args.get(match[1]) for match in skipped_by)
        if value is None or is_skipped or not name.startswith(MUST_AGREE):
            continue
        asked = any(map(engine_args.get, re.findall(r"\w\.(\w+)", value["truth"] or "")))
        if keeps and name in environ and not asked:
            found[name] = environ[name]
        else:
            found[name] = str(int(asked)) if value["literal"] is None else value["literal"]
    return found


def meaning(name: str, value: str | None) -> object:
    """Return what SGLang understands by a variable's value; None: unset.

    Its Engine writes defaults into the environment, such as SGLANG_ENABLE_TORCH_COMPILE = 0, which change nothing. And
    no import looks at the cores of an engine, which its schedulers look at when they start.
    """
    if name == CORES:
        return None
    fields = vars(type(load("srt/environ.py", "envs")))
    field = fields.get(name)
    if not hasattr(field, "parse") or not hasattr(field, "default"):
        return value
    default = field.default() if callable(field.default) else field.default
    try:
        return default if value is None else field.parse(value)
    except ValueError:  # SGLang warns and takes the default
        return default


def _assignments(body: list[ast.stmt], tests: tuple[str, ...] = ()) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each os.environ[variable] = value of a block, but not of nested functions, with the tests of the `if`s
    around.
    """
    for statement in body:
        match statement:
            case ast.If(test=test):
                yield from _assignments(statement.body + statement.orelse, (*tests, ast.unparse(test)))
            case ast.Assign(targets=[ast.Subscript(value=table, slice=ast.Constant(value=str(name)))], value=value):
                if ast.unparse(table) == "os.environ":
                    yield name, ast.unparse(value), tests
