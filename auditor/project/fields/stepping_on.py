"""A lease that is made of the one before: `job.node = tree.grow(job.node, chunk)`. Whether the pool has ended
that is told by another method that takes the same step, and gives back the former one."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, fillings, same
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def told_the_former(filling: Filling, call: ast.Call) -> frozenset[int]:
    """Where the call is told what lies in the field that it fills."""
    return frozenset(
        id(each)
        for each in call.args
        if filling.key is None and own_attribute(each, filling.owner) == filling.field
    )


def is_of_its_own_tables(filling: Filling, own: str) -> bool:
    """`job = self.jobs[key]`."""
    values = list(given_to(filling.method, filling.owner))
    return len(values) == 1 and any(
        isinstance(value, ast.Subscript) and own_attribute(value.value, own) is not None for value in values
    )


def others_give_it_back(
    filling: Filling, call: ast.Call, family: Sequence[Function], ending: Set[str]
) -> bool:
    """`former = job.node`, `job.node = tree.grow(former, chunk)`, `tree.let_go(former)` in another method."""
    return any(
        _steps_and_ends(method, other, call, ending)
        for method in family
        if method is not filling.method
        for owner in _owners(method, filling.field)
        for other in fillings(method, owner, filling.field)
    )


def _owners(method: Function, field: str) -> Iterator[str]:
    stored = (n for n in method.nodes if isinstance(n, ast.Attribute) and n.attr == field)
    yield from sorted({n.value.id for n in stored if isinstance(n.value, ast.Name)})


def _steps_and_ends(method: Function, other: Filling, call: ast.Call, ending: Set[str]) -> bool:
    stored = getattr(other.statement, "value", None)
    if not isinstance(stored, ast.expr):
        return False
    names = {node.id for node in walk(stored) if isinstance(node, ast.Name)}
    values = [stored, *(value for name in names for value in given_to(method, name))]
    steps = [each for value in values for each in walk(value) if isinstance(each, ast.Call)]
    former = {
        ast.unparse(argument)
        for step in steps
        if same(step.func, call.func)
        for argument in step.args
        if _is_the_former(argument, other)
    }
    ends = (each for each in method.calls if last_name(each) in ending)
    return any(ast.unparse(argument) in former for each in ends for argument in each.args)


def _is_the_former(argument: ast.expr, other: Filling) -> bool:
    """`job.node`, or a name that was given it."""
    given = [argument]
    if isinstance(argument, ast.Name):
        given += given_to(other.method, argument.id)
    return any(own_attribute(each, other.owner) == other.field for each in given)
