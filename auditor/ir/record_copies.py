"""Calls that make a record of another one: `copy.copy(beam)`, `dataclasses.replace(beam, score=0.0)`.

The new record is made here, but for what lies within its fields: `twin.pages` is the list that the other has,
until another one is put there."""

import ast

COPYING = frozenset({"copy", "deepcopy"})
REPLACING = frozenset({"replace", "evolve"})
MODULES = frozenset({"copy", "dataclasses", "attr", "attrs"})


def copies_a_record(node: ast.AST) -> bool:
    """`lines.copy()` and `name.replace("a", "b")` make no records."""
    if not isinstance(node, ast.Call):
        return False
    match node.func:
        case ast.Attribute(attr="_replace"):
            return bool(node.keywords) and not node.args
        case ast.Name(id=name):
            return _makes_another(node, name)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return module in MODULES and _makes_another(node, name)
    return False


def _makes_another(call: ast.Call, name: str) -> bool:
    told = bool(call.keywords) if name in REPLACING else name in COPYING
    return told and len(call.args) == 1
