"""Objects that say how much: `grant.tokens += extra.tokens`, where whoever gives `grant` back gives back its
tokens, makes one of two, and nobody owes the other any more."""

import ast

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.field_paths import mentions
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.pool_state import own_parameters


def is_absorbed(recogniser: Recogniser, function: Function, added: ast.AST, protocol: str) -> bool:
    """By one that lies in a table of the object, whose class ends such leases."""
    match added:
        case ast.AugAssign(
            target=ast.Attribute(value=ast.Name(id=name), attr=amount),
            op=ast.Add(),
            value=ast.Attribute(attr=same),
        ) if amount == same:
            pass
        case _:
            return False
    ends = [half for half, (pair, _) in recogniser.releasing.items() if pair.name == protocol]
    if not any(_reads(end, amount) for end in ends):
        return False
    found = [_table(value, function.owner or "") for value in given_to(function, name)]
    return bool(found) and all(table is not None and _is_ended(function, table, ends) for table in found)


def _is_ended(function: Function, table: str, ends: list[Function]) -> bool:
    """A method of the class gives back what has to do with the table."""
    names = {end.name for end in ends}
    methods = function.cls.methods.values() if function.cls is not None else ()
    return any(
        mentions(each, table) and any(last_name(call) in names for call in each.calls)
        for each in methods
        if each is not function
    )


def _reads(end: Function, field: str) -> bool:
    """`self.left += grant.tokens`."""
    told = own_parameters(end)
    return any(
        isinstance(node, ast.AugAssign)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == field
        and getattr(node.value.value, "id", "") in told
        for node in end.statements
    )


def _table(value: ast.expr, owner: str) -> str | None:
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="get")) | ast.Subscript(value=table):
            return own_attribute(table, owner)
    return None
