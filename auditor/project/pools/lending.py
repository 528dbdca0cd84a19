"""The pool's own context manager around a pair of its methods: what a `with` may be written with."""

import ast
from collections.abc import Sequence

from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function


def lending(model: ClassModel, owner: Class, acquire: Function, release: Function) -> str | None:
    """The pool's own context manager around this very pair, called with the same arguments."""
    found = []
    for cls in model.lineage(owner):
        found += [
            method.name
            for method in cls.methods.values()
            if "contextmanager" in method.decorators
            and _parameters(method) == _parameters(acquire)
            and {acquire.name, release.name} <= _own_methods_called(method)
        ]
    return min(found, default=None)


def _parameters(function: Function) -> tuple[Sequence[str], Sequence[str], str | None, str | None]:
    assert not isinstance(function.node, ast.Module)
    args = function.node.args
    return (
        [arg.arg for arg in (*args.posonlyargs, *args.args)],
        [arg.arg for arg in args.kwonlyargs],
        args.vararg.arg if args.vararg else None,
        args.kwarg.arg if args.kwarg else None,
    )


def _own_methods_called(function: Function) -> set[str]:
    own = function.parameters[:1]
    return {
        call.func.attr
        for call in function.calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in own
    }
