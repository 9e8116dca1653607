"""Environment variables: which ones this SGLang's Engine sets in the process that builds it, and which ones it obeys.

The Engine sets NCCL_CUMEM_ENABLE and others in os.environ of the one rank that builds it. NCCL communicators made later
by that rank then differ from those of its peers, and the trainer's next collective dies ("Cuda failure 'invalid
argument'"). So every rank is given the same values before its first collective.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import ENGINE, MODEL_RUNNER, OLD_ENGINE, SGLangApi

SET_ENVIRONMENT = "_set_envs_and_config"
DISABLE_BALANCE = ("SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK")
ENABLE_BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
MUST_AGREE = ("NCCL_", "TORCH_NCCL_", "CUDA_")


@dataclass(frozen=True, kw_only=True)
class EnvironmentChange:
    """Variables to set and to unset before the engine is built."""

    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnvironmentRule:
    """One assignment to os.environ in the process that builds the Engine."""

    variable: str
    value: str | None = None
    """The literal value; None when `arguments` or something unknown decides."""
    arguments: tuple[str, ...] = ()
    """Engine arguments whose truth, or-ed, is the value ("0" or "1"); all are False by default."""
    keeps_user_value: bool = False
    """A value found in the environment stays, unless one of `arguments` is true."""
    skipped_by: tuple[str, ...] = ()
    """Engine arguments that, when true, leave the variable alone."""
    certain: bool = True
    """False: the assignment also depends on something else (the hardware, another argument); it cannot be foretold."""


def memory_imbalance_environment(api: SGLangApi) -> EnvironmentChange:
    """What lets an engine start beside a trainer that already holds memory on some of its GPUs.

    Until 0.5.6.post2 SGL_DISABLE_... = true is read where the check is made (0.4.5.post2 on; before, nothing turns it
    off and both parts are empty). Since 0.5.7 it is SGLANG_ENABLE_... = 0; the old names must then be absent, since
    0.5.7 to 0.5.17 copy SGL_DISABLE's value into ENABLE unchanged, so that "disable = true" enables.
    """
    if ENABLE_BALANCE in api.tree.text("srt/environ.py"):
        return EnvironmentChange(set={ENABLE_BALANCE: "0"}, unset=DISABLE_BALANCE)
    if DISABLE_BALANCE[0] in api.tree.text(MODEL_RUNNER):
        return EnvironmentChange(set={DISABLE_BALANCE[0]: "true"})
    return EnvironmentChange()


def engine_environment_rules(api: SGLangApi) -> tuple[EnvironmentRule, ...]:
    """Every assignment to os.environ that building an Engine makes, in source order.

    Read from the function that makes them. Raises ValueError when this SGLang has no such function or it assigns
    nothing: then which ranks disagree would be a guess, and `common_environment` must not be made of one.
    """
    function = api.tree.find_function(SET_ENVIRONMENT, ENGINE, OLD_ENGINE)
    rules = tuple(_rules(function.body, ())) if function else ()
    if not rules:
        raise ValueError(
            f"sglang {api.version} has no function {SET_ENVIRONMENT} that assigns to os.environ: find where its Engine "
            "sets NCCL_* and CUDA_* variables, and give every rank the same ones."
        )
    return rules


def common_environment(
    rules: tuple[EnvironmentRule, ...], engine_args: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, str]:
    """What every rank must have in its environment before its first collective: the NCCL_*, TORCH_NCCL_* and CUDA_*
    values that the Engine will have set on the rank that builds it, from that rank's own `environ`.

    Rules that are not certain are left out; compare the environments after the engine is up to see them. Set on every
    rank, the engine's one included: 0.5.17 and newer then keep NCCL_CUMEM_ENABLE = 0 where they would choose 1, on an
    engine over several hosts of one NVLink fabric (GB200).
    """
    found: dict[str, str] = {}
    for rule in rules:
        skipped = any(engine_args.get(name) for name in rule.skipped_by)
        if skipped or not rule.certain or not rule.variable.startswith(MUST_AGREE):
            continue
        asked = any(engine_args.get(name) for name in rule.arguments)
        if rule.keeps_user_value and rule.variable in environ and not asked:
            found[rule.variable] = environ[rule.variable]
        elif rule.value is not None:
            found[rule.variable] = rule.value
        else:
            found[rule.variable] = str(int(asked))
    return found


def _rules(body: list[ast.stmt], tests: tuple[ast.expr, ...]) -> Iterator[EnvironmentRule]:
    """Rules of a block that runs when all `tests` hold. Nested functions (signal handlers) are not entered."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _rules(statement.body, (*tests, statement.test))
            yield from _rules(statement.orelse, (*tests, statement.test))
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Subscript) and source.dotted_name(target.value) == "os.environ":
                yield _rule(target.slice, statement.value, tests, keeps=False)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if source.dotted_name(call.func) == "os.environ.setdefault":
                yield _rule(call.args[0], call.args[1], tests, keeps=True)


def _rule(name: ast.expr, value: ast.expr, tests: tuple[ast.expr, ...], keeps: bool) -> EnvironmentRule:
    variable = _literal(name) or "?"
    literal = _literal(value)
    arguments = _truth_arguments(value)
    own = [test for test in tests if any(_literal(node) == variable for node in ast.walk(test))]
    skipped_by = tuple(attribute for test in tests if (attribute := _negated_attribute(test)))
    return EnvironmentRule(
        variable=variable,
        value=literal,
        arguments=arguments,
        keeps_user_value=keeps or bool(own),
        skipped_by=skipped_by,
        certain=len(own) + len(skipped_by) == len(tests) and (literal is not None or bool(arguments)),
    )


def _literal(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _negated_attribute(test: ast.expr) -> str | None:
    """x of `not args.x`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Attribute):
        return test.operand.attr
    return None


def _truth_arguments(value: ast.expr) -> tuple[str, ...]:
    """a and b of `str(int(args.a or args.b))`, else nothing."""
    for function in ("str", "int"):
        if not (isinstance(value, ast.Call) and source.dotted_name(value.func) == function and len(value.args) == 1):
            return ()
        value = value.args[0]
    operands = value.values if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or) else [value]
    return tuple(node.attr for node in operands if isinstance(node, ast.Attribute))
