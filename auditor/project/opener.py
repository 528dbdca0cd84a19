"""A class of the tree whose objects hold something open until they are told to close it: a client, a store.

Whoever makes such an object for himself owes its end. Objects that are kept (in a field, by a module, by a
function that was given them) are not asked about: they may be meant to last as long as the process.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.project.bindings import TEST_FILE
from auditor.project.modules import Class, Function

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
        """By being made, or by what this function does with what it made; who works on the field itself may
        end that."""
        used = {*_attributes_of(function, call)}
        return used.isdisjoint(self.fields) and (
            "__init__" in self.opening or not used.isdisjoint(self.opening)
        )


def ends_with_the_process(function: Function) -> bool:
    """Not before long, at least: a script's, or a test's."""
    return function.name in LASTING or TEST_FILE.search(function.module.path) is not None


def _attributes_of(function: Function, call: ast.Call) -> Iterator[str]:
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
            yield node.attr
