"""Containers of an object in which one of its methods notes what it has marked, as it is or in a list:
`cache.pin(key)`, and `self.pinned.append(key)`, or `node.hold()`, and `self.held[rid] = (rid, node)`."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle
from auditor.flow.knowledge import FILLING
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, given_to, names_bound, own_attribute
from auditor.project.code.modules import Function
from auditor.project.outcome import Outcome


def places_noting(outcome: Outcome) -> Iterator[Path]:
    """Where in the containers the marked thing lies then."""
    function, call, own = outcome.function, outcome.call, outcome.function.owner
    names = set(_marked(outcome))
    names |= {to.id for to, value in assignments(function) if value is call and isinstance(to, ast.Name)}
    if not outcome.acquisition.keyed or own is None or not names or any(_is_bound_again(function, names)):
        return
    lists = set(_lists_of(function, names, call.lineno))
    for container, value in _entered(function, call.lineno):
        field = own_attribute(container, own)
        if field is not None:
            for piece in _pieces(value, call, names, lists):
                yield own, f".{field}", ANY_ITEM, *piece


def _is_bound_again(function: Function, names: Set[str]) -> Iterator[bool]:
    """By one loop, and by another statement after it: what is noted there is another one."""
    for name in names:
        yield sum(name in set(names_bound(node)) for node in function.statements) > 1


def _marked(outcome: Outcome) -> Iterator[str]:
    """`key` of `cache.pin(key)`, `node` of `node.hold()`."""
    match outcome.acquisition.handle, outcome.call:
        case Handle.ARGUMENT, ast.Call(args=[ast.Name(id=name), *_]):
            yield name
        case Handle.RECEIVER, ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            yield name


def _pieces(value: ast.expr, call: ast.Call, names: Set[str], lists: Set[str]) -> Iterator[Path]:
    """Which part of the entry it is: all, one of several, or each of a list."""
    match value:
        case ast.Tuple(elts=parts):
            for at, part in enumerate(parts):
                if isinstance(part, ast.Name) and part.id in names:
                    yield (f"[{at}]",)
        case ast.Name(id=name) if name in names:
            yield ()
        case ast.Name(id=name) if name in lists:
            yield (ANY_ITEM,)
        case _ if value is call:
            yield ()


def _lists_of(function: Function, names: Set[str], line: int) -> Iterator[str]:
    """`kept` of `kept.append(key)`, made here."""
    for each in function.calls:
        match each:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=kept), attr=way), args=[ast.Name(id=name)]):
                made = [ast.unparse(value) for value in given_to(function, kept)]
                if way in FILLING and name in names and each.lineno >= line and made in (["[]"], ["set()"]):
                    yield kept


def _entered(function: Function, line: int) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target, value in assignments(function):
        if isinstance(target, ast.Subscript) and target.lineno >= line:
            yield target.value, value
    for each in function.calls:
        match each:
            case ast.Call(func=ast.Attribute(value=container, attr=way), args=[value]) if way in FILLING:
                if each.lineno >= line:
                    yield container, value
