"""Functions that a function makes and hands out together: `take, give = make_pool(8)`."""

import ast
import re
from collections.abc import Mapping

from auditor.project.code.modules import Function


def handed_out(factory: Function) -> tuple[Function, ...]:
    """Its own functions, in the order of the tuple that it returns."""
    for node in factory.statements if len(factory.nested) > 1 else ():
        match node:
            case ast.Return(value=ast.Tuple(elts=parts)):
                names = [getattr(part, "id", "") for part in parts]
                if all(name in factory.nested for name in names):
                    return tuple(factory.nested[name] for name in names)
    return ()


Given = tuple[ast.expr, int, int]
"""What is called for a name, and which of how many results it has."""


def given_in(scope: Function) -> dict[str, Given]:
    """By the names of `take, give = make_pool(8)`; those of fields, `self.take`, with a dot before."""
    found: dict[str, Given] = {}
    for node in scope.statements:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call(func=func)):
                for index, target in enumerate(targets):
                    if name := _name(target, scope.owner):
                        found[name] = func, index, len(targets)
    return found


def _name(target: ast.expr, owner: str | None) -> str:
    match target:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=root), attr=attr) if root == owner:
            return f".{attr}"
    return ""


def names_given(factories: set[str], sources: Mapping[str, str]) -> set[str]:
    """What the functions of these factories are called by those who have them."""
    found: set[str] = set()
    for name in factories:
        bound = re.compile(rf"^[ \t]*([\w., \t]+?) = (?:\w+\.)*{name}\(", re.MULTILINE)
        for text in sources.values():
            for targets in bound.findall(text) if f"{name}(" in text else ():
                found.update(each.strip().rpartition(".")[2] for each in targets.split(","))
    return found
