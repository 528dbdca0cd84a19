"""A class of the tree whose objects hold something open until they are told to close it: a client, a store.

Whoever makes such an object for himself owes its end. Objects that are kept (in a field, by a module, by a
function that was given them) are not asked about: they may be meant to last as long as the process.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.modules import Class, Function
from auditor.project.code.release_names import looks_releasing

LASTING = frozenset({"main", "_main", "<module>"})
"""Functions with which the process ends."""


@dataclass(slots=True)
class Opener:
    """`opening` are the methods that fill a field, or call one that does; `closing` release it."""

    cls: Class
    fields: set[str]
    opening: set[str]
    closing: set[Function]

    def is_opened(self, function: Function, call: ast.Call) -> bool:
        """By being made, or by what this function does with what it made; who gives the field itself away may
        end that."""
        used = list(_attributes_of(function, call))
        given = _given_away(function)
        if any(node.attr in self.fields and id(node) in given for node in used):
            return False
        return "__init__" in self.opening or any(node.attr in self.opening for node in used)


def ends_with_the_process(function: Function) -> bool:
    """Not before long, at least: a script's, or a test's."""
    return function.name in LASTING or TEST_FILE.search(function.module.path) is not None


def _given_away(function: Function) -> set[int]:
    """Nodes that are returned, kept under another name, or an operand of a call that looks like an end."""
    found: set[int] = set()
    for node in ast.walk(function.node):
        match node:
            case (
                ast.Return(value=ast.expr() as value)
                | ast.Assign(value=value)
                | ast.Yield(value=ast.expr() as value)
            ):
                found.add(id(value))
            case ast.Call(func=ast.Attribute(value=owner), args=args) if looks_releasing(node):
                found.update(map(id, (owner, *args)))
            case ast.Call(args=args) if looks_releasing(node):
                found.update(map(id, args))
            case ast.withitem(context_expr=value):
                found.add(id(value))
    return found


def _attributes_of(function: Function, call: ast.Call) -> Iterator[ast.Attribute]:
    """What the function reads of the object that this call makes."""
    names = {
        target.id
        for node in ast.walk(function.node)
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function.node):
        if isinstance(node, ast.Attribute) and (
            node.value is call or getattr(node.value, "id", None) in names
        ):
            yield node
