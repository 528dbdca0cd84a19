"""Counts that go down and up by amounts: what is handed out for an amount says how much goes back."""

import ast

from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork, field_work
from auditor.project.shapes.pool_state import own_parameters


def takes_an_amount(taker: Function) -> bool:
    """`reserve(rows)` does `self.rows -= rows`."""
    told = own_parameters(taker)[:1]
    return any(isinstance(value, ast.Name) and value.id in told for _, _, value in field_work(taker).amounts)


def returns_the_amount(taker: Function) -> bool:
    """`self.left -= granted; return granted`; what is not there is told by a constant."""
    work = field_work(taker)
    amounts = {ast.unparse(value) for _, way, value in work.amounts if way < 0}
    told = {ast.unparse(value) for value in work.returned if not isinstance(value, ast.Constant)}
    return bool(told) and told <= amounts


def carries_the_amount(taker: FieldWork, giver: FieldWork, counter: str) -> bool:
    """`self.units -= n; return Grant(n)` and `self.units += grant.units`: the object says how much."""
    taken = {ast.unparse(value) for field, _, value in taker.amounts if field == counter}
    made = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id[:1].isupper()
        and any(ast.unparse(given) in taken for given in _arguments(node))
        for node in taker.method.nodes
    )
    return made and any(
        field == counter
        and isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Name)
        and value.value.id in giver.told
        for field, _, value in giver.amounts
    )


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
