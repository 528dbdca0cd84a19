"""Messages that say by one part what lies in another: `kind, item = inbox.get()`, `if kind == "stop":`.

Then not every message has a lease in it, and nobody but its sender knows which."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def says_what_it_is(function: Function, name: str, message: ast.expr) -> bool:
    """Whether what was bound beside the name, out of the same message, is asked for."""
    beside = set(_beside(function, name, message))
    of_message = message.id if isinstance(message, ast.Name) else ""
    return any(
        (isinstance(each, ast.Name) and each.id in beside)
        or (isinstance(each, ast.Subscript) and getattr(each.value, "id", None) == of_message)
        for asked in _asked(function)
        for each in _compared(asked)
    )


def _beside(function: Function, name: str, message: ast.expr) -> Iterator[str]:
    for node in function.statements:
        for target, value in assigned_by(node):
            if value is message and isinstance(target, ast.Tuple):
                for part in walk(target):
                    if isinstance(part, ast.Name) and part.id != name:
                        yield part.id


def _asked(function: Function) -> Iterator[ast.expr]:
    for node in function.nodes:
        match node:
            case ast.If(test=asked) | ast.While(test=asked) | ast.IfExp(test=asked) | ast.Assert(test=asked):
                yield asked
            case ast.Match(subject=asked):
                yield asked


def _compared(asked: ast.expr) -> Iterator[ast.expr]:
    """What a test is about: not what it calls something with."""
    match asked:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _compared(value)
        case ast.UnaryOp(operand=operand):
            yield from _compared(operand)
        case ast.Compare(left=left, comparators=others):
            yield from (left, *others)
        case ast.Call(func=ast.Name(id="isinstance"), args=[first, *_]):
            yield first
        case ast.NamedExpr(target=target):
            yield target
        case _:
            yield asked
