"""What `return first and second` says of two that were asked for: yes is both, no may be one of them."""

import ast
from collections.abc import Iterable, Iterator, Set

from auditor.flow.lease import Leak, Loss
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def told_of_both(function: Function, acquire: ast.Call, leaks: Iterable[Leak]) -> tuple[Leak, ...]:
    """Without those at such an answer, where `if first and not second:` has seen to one that is alone."""
    leaks = tuple(leaks)
    if not any(leak.loss is Loss.RETURN for leak in leaks):
        return leaks
    told = {
        node.lineno
        for node in function.statements
        if isinstance(node, ast.Return) and (others := asked_beside(function, acquire, node.value))
        if _are_held_against(function, others | set(_names_of(function, acquire)))
    }
    return tuple(leak for leak in leaks if leak.loss is not Loss.RETURN or leak.at.line not in told)


def asked_beside(function: Function, acquire: ast.Call, answer: ast.expr | None) -> set[str]:
    """The other names in `first and second`, all of them given by calls, if one of the two is of this
    acquire."""
    match answer:
        case ast.BoolOp(op=ast.And(), values=values):
            names = {each.id for each in values if isinstance(each, ast.Name)}
            others = names - set(_names_of(function, acquire))
            asked = {at.id for at, value in assignments(function)
                     if isinstance(at, ast.Name) and isinstance(value, ast.Call)}  # fmt: skip
            if len(names) == len(values) and others < names and others <= asked:
                return others
    return set()


def _names_of(function: Function, acquire: ast.Call) -> Iterator[str]:
    for target, value in assignments(function):
        if value is acquire and isinstance(target, ast.Name):
            yield target.id


def _are_held_against(function: Function, names: Set[str]) -> bool:
    """`if first and not second:`, `if first != second:`"""
    tests = (node.test for node in function.statements if isinstance(node, ast.If))
    return any(names <= _named(test) for test in tests)


def sees_to_one_alone(function: Function, at: ast.If) -> bool:
    """`if first and not second: budget.give(a)`, before `return first and second`."""
    answers = (node.value for node in function.statements if isinstance(node, ast.Return))
    both = (answer for answer in answers if isinstance(answer, ast.BoolOp) and isinstance(answer.op, ast.And))
    return any(len(named := _named(answer)) > 1 and named <= _named(at.test) for answer in both)


def _named(node: ast.expr) -> Set[str]:
    return {each.id for each in walk(node) if isinstance(each, ast.Name)}
