"""Environment variables: which ones this SGLang's Engine sets in the process that builds it, and which ones it obeys.

The Engine sets NCCL_CUMEM_ENABLE and others in os.environ of the one rank that builds it. NCCL communicators made later
by that rank then differ from those of its peers, and the trainer's next collective dies ("Cuda failure 'invalid
argument'"). So every rank is given the same values before its first collective.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.rollout.sglang_api.probe import ENGINE, SGLangApi

SET_ENVIRONMENT = "_set_envs_and_config"
MUST_AGREE = ("NCCL_", "TORCH_NCCL_", "CUDA_")
DISABLE_BALANCE = ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")
ENABLE_BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"

VALUE = re.compile(r"'(?P<literal>.*)'|str\(int\((?P<truth>.*\w\.\w.*)\)\)")
"""Values that engine arguments alone decide: a constant, or str(int(args.a or args.b))."""
NEGATED = re.compile(r"not \w+\.(\w+)")


def memory_imbalance_environment(api: SGLangApi) -> dict[str, str | None]:
    """Return what lets an engine start beside a trainer that already holds memory on some GPUs; None removes a variable.

    Until 0.5.6.post2 SGL_DISABLE_... = true is read where the check is made. Since 0.5.7 it is SGLANG_ENABLE_... = 0; the
    old names must then be absent, since 0.5.7 to 0.5.17 copy SGL_DISABLE's value into ENABLE unchanged, so that
    "disable = true" enables.
    """
    if ENABLE_BALANCE in api.tree.text("srt/environ.py"):
        return {ENABLE_BALANCE: "0"} | dict.fromkeys(DISABLE_BALANCE)
    return {DISABLE_BALANCE[0]: "true"}


def common_environment(api: SGLangApi, engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what every rank must have in its environment before its first collective.

    These are the NCCL_*, TORCH_NCCL_* and CUDA_* values that the Engine will have set on the rank that builds it, from
    that rank's own `environ`. Those that depend on more than engine arguments (the hardware, say) are left out. Set on
    every rank, the engine's one included: 0.5.17 and newer then keep NCCL_CUMEM_ENABLE = 0 where they would choose 1, on
    an engine over several hosts of one NVLink fabric.

    Raises ValueError when this SGLang has no function that sets them: which ranks disagree would then be a guess.
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
        keeps = any(name in test for test in tests)  # a value that is already there
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


def _assignments(body: list[ast.stmt], tests: tuple[str, ...] = ()) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each os.environ[variable] = value of a block, but not of nested functions, with the tests of the `if`s around."""
    for statement in body:
        match statement:
            case ast.If(test=test):
                yield from _assignments(statement.body + statement.orelse, (*tests, ast.unparse(test)))
            case ast.Assign(targets=[ast.Subscript(value=table, slice=ast.Constant(value=str(name)))], value=value):
                if ast.unparse(table) == "os.environ":
                    yield name, ast.unparse(value), tests
