"""Arguments that decide whether a call lends: `make(n, pooled=True)`, `read(out=buffer)`."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Position
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.project.code.bindings import assignments
from auditor.project.code.calls import constants_passed, is_bound, parameter_for
from auditor.project.code.modules import Function
from auditor.source.pool_use import parameters


def decided_otherwise(
    function: Function, target: Function, call: ast.Call, unless: frozenset[str], needed: Knowledge
) -> bool:
    """A buffer is given to a method that takes one only `if out is None`, or a switch is set so that nothing
    is taken. What the calling function need not be told, `out=None`, may be None."""
    passed = constants_passed(target, call, is_bound(target, call)) if needed else ()
    for name, value in passed:
        if (name, not value) in needed or (f"{name} is None", value is not None) in needed:
            return True
    perhaps = set(_none_by_default(function))
    return any(
        name in unless
        and not (isinstance(value, ast.Constant) and value.value is None)
        and not (isinstance(value, ast.Name) and value.id in perhaps)
        for name, value in _arguments(target, call)
    )


def _none_by_default(function: Function) -> Iterator[str]:
    """Parameters of which None is the default, and which nobody gives another value."""
    if not isinstance(function.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    changed = {target.id for target, _ in assignments(function) if isinstance(target, ast.Name)}
    for name, _, default in parameters(function.node):
        if isinstance(default, ast.Constant) and default.value is None and name not in changed:
            yield name


def told_of_arguments(target: Function, call: ast.Call, needed: Knowledge) -> Knowledge:
    """`make(pool, pooled=self.pooled)` lends where `pooled` is true: where it lent, `self.pooled` is."""
    if not needed:
        return NOTHING
    told: set[tuple[str, bool]] = set()
    for name, value in _arguments(target, call):
        denied = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
        said = value.operand if isinstance(value, ast.UnaryOp) and denied else value
        if not isinstance(said, (ast.Name, ast.Attribute)):
            continue
        text = ast.unparse(said)
        for truth in (True, False):
            if (name, truth) in needed:
                told.add((text, truth != denied))
            if (f"{name} is None", truth) in needed and not denied:
                told.add((f"{text} is None", truth))
    return frozenset(told)


def _arguments(target: Function, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Parameters with what this call gives for them."""
    bound = is_bound(target, call)
    given: list[tuple[Position, ast.expr]] = list(enumerate(call.args))
    given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
    for position, value in given:
        name = parameter_for(target, position, bound)
        if name is not None:
            yield name, value
