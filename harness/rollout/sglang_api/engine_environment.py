"""Environment variables: which ones this SGLang's Engine sets in the process that builds it, and which ones it obeys.

The Engine sets NCCL_CUMEM_ENABLE and others in os.environ of the one rank that builds it. NCCL communicators made later
by that rank then differ from those of its peers, and the trainer's next collective dies ("Cuda failure 'invalid
argument'"). So every rank is given the same values before its first collective.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from harness.rollout.sglang_api.probe import ENGINE, MODEL_RUNNER, OLD_ENGINE, SGLangApi

SET_ENVIRONMENT = "_set_envs_and_config"
DISABLE_BALANCE = ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")
ENABLE_BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
MUST_AGREE = ("NCCL_", "TORCH_NCCL_", "CUDA_")

_Assignment = tuple[str, ast.expr, tuple[ast.expr, ...], bool]
"""Variable, value, the tests of the `if` statements around it, and whether a value that is already there stays."""


def memory_imbalance_environment(api: SGLangApi) -> dict[str, str | None]:
    """Return what lets an engine start beside a trainer that already holds memory on some GPUs; None removes a variable.

    Until 0.5.6.post2 SGL_DISABLE_... = true is read where the check is made (0.4.5.post2 on; before, nothing turns it
    off, and nothing is returned). Since 0.5.7 it is SGLANG_ENABLE_... = 0; the old names must then be absent, since
    0.5.7 to 0.5.17 copy SGL_DISABLE's value into ENABLE unchanged, so that "disable = true" enables.
    """
    if ENABLE_BALANCE in api.tree.text("srt/environ.py"):
        return {ENABLE_BALANCE: "0"} | dict.fromkeys(DISABLE_BALANCE)
    return {DISABLE_BALANCE[0]: "true"} if DISABLE_BALANCE[0] in api.tree.text(MODEL_RUNNER) else {}


def common_environment(api: SGLangApi, engine_args: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what every rank must have in its environment before its first collective.

    These are the NCCL_*, TORCH_NCCL_* and CUDA_* values that the Engine will have set on the rank that builds it, from
    that rank's own `environ`. Those that depend on more than engine arguments (the hardware, say) are left out; compare
    the environments after the engine is up to see them. Set on every rank, the engine's one included: 0.5.17 and newer
    then keep NCCL_CUMEM_ENABLE = 0 where they would choose 1, on an engine over several hosts of one NVLink fabric.

    Raises ValueError when this SGLang has no function that sets them: which ranks disagree would then be a guess.
    """
    function = api.tree.find_function(SET_ENVIRONMENT, ENGINE, OLD_ENGINE)
    assignments = list(_assignments(function.body, ())) if function else []
    if not assignments:
        raise ValueError(
            f"sglang {api.version} has no function {SET_ENVIRONMENT} that assigns to os.environ: find where its Engine "
            "sets NCCL_* and CUDA_* variables, and give every rank the same ones."
        )
    found = {}
    for name, value, tests, keeps in assignments:
        literal, arguments = _literal(value), _truth_arguments(value)
        own = [test for test in tests if any(_literal(node) == name for node in ast.walk(test))]
        skipped_by = [argument for test in tests if (argument := _negated_argument(test))]
        is_certain = len(own) + len(skipped_by) == len(tests) and (literal is not None or arguments)
        if not name.startswith(MUST_AGREE) or not is_certain or any(map(engine_args.get, skipped_by)):
            continue
        asked = any(map(engine_args.get, arguments))
        if (keeps or own) and name in environ and not asked:
            found[name] = environ[name]
        else:
            found[name] = str(int(asked)) if literal is None else literal
    return found


def _assignments(body: list[ast.stmt], tests: tuple[ast.expr, ...]) -> Iterator[_Assignment]:
    """Yield those to os.environ of a block that runs when all `tests` hold, but not of nested functions."""
    for statement in body:
        match statement:
            case ast.If():
                yield from _assignments(statement.body, (*tests, statement.test))
                yield from _assignments(statement.orelse, (*tests, statement.test))
            case ast.Assign(targets=[ast.Subscript(value=table, slice=variable)], value=value):
                if ast.unparse(table) == "os.environ":
                    yield _literal(variable) or "?", value, tests, False
            case ast.Expr(value=ast.Call(func=function, args=[variable, value])):
                if ast.unparse(function) == "os.environ.setdefault":
                    yield _literal(variable) or "?", value, tests, True


def _literal(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _negated_argument(test: ast.expr) -> str | None:
    """Return x of `not args.x`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(attr=name)):
            return name
    return None


def _truth_arguments(value: ast.expr) -> list[str]:
    """Return a and b of `str(int(args.a or args.b))`, else nothing."""
    match value:
        case ast.Call(func=ast.Name("str"), args=[ast.Call(func=ast.Name("int"), args=[truth])]):
            operands = truth.values if isinstance(truth, ast.BoolOp) and isinstance(truth.op, ast.Or) else [truth]
            return [node.attr for node in operands if isinstance(node, ast.Attribute)]
    return []
