"""The methods of a module that run when it is called."""

import ast
from collections.abc import Iterator

from auditor.adopt.uses import Function

_ENTRY_POINTS = ("forward", "__call__")


def forward_path(owner: ast.ClassDef) -> list[Function]:
    """The entry points of a module, and the methods that they reach on the object itself."""
    methods = {
        each.name: each for each in owner.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    waiting = [name for name in _ENTRY_POINTS if name in methods]
    reached: dict[str, Function] = {}
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = methods[name]
            waiting += [called for called in _own_calls(methods[name]) if called in methods]
    return sorted(reached.values(), key=lambda each: each.lineno)


def _own_calls(method: Function) -> Iterator[str]:
    first = next(iter([*method.args.posonlyargs, *method.args.args]), None)
    for node in ast.walk(method):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=called)) if (
                first and name == first.arg
            ):
                yield called
