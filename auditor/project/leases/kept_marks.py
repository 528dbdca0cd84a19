"""Objects that count, pin or lock something when they are made, and take that back when they are closed:
`Handle(registry, key)`, which asks `registry.incref(key)`, and `handle.close()`, which asks
`registry.decref(self.key)`."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome


def kept_marks(outcome: Outcome, ending: Set[str]) -> Iterator[tuple[str, Function]]:
    """Fields in which the constructor keeps what it has marked, with the methods that unmark what lies there.
    `ending` are the names of what unmarks."""
    function, cls = outcome.function, outcome.function.cls
    marked = _marked(outcome)
    if cls is None or marked is None or function.name != "__init__" or outcome.unless or outcome.asked:
        return
    for field in sorted(_fields_of(function, marked)):
        for method in cls.methods.values():
            if method is not function and _unmarks(method, field, outcome.acquisition.handle, ending):
                yield field, method


def _marked(outcome: Outcome) -> ast.expr | None:
    """What is told, or asked itself."""
    match outcome.acquisition.handle, outcome.call:
        case Handle.ARGUMENT, ast.Call(args=[told, *_]):
            return told
        case Handle.RECEIVER, ast.Call(func=ast.Attribute(value=asked)):
            return asked
    return None


def _fields_of(function: Function, marked: ast.expr) -> Iterator[str]:
    """`self.key = key`; or it is the field that was told."""
    own = function.owner or ""
    if (field := own_attribute(marked, own)) is not None:
        yield field
    for target, value in assignments(function):
        field = own_attribute(target, own)
        if field is not None and isinstance(marked, ast.Name) and ast.unparse(value) == marked.id:
            yield field


def _unmarks(method: Function, field: str, handle: Handle, ending: Set[str]) -> bool:
    own = method.owner or ""
    asked = (
        call for call in method.calls if last_name(call) in ending and isinstance(call.func, ast.Attribute)
    )
    return any(
        own_attribute(told, own) == field
        for call in asked
        for told in (call.args[:1] if handle is Handle.ARGUMENT else [getattr(call.func, "value", call.func)])
    )
