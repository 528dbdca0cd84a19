"""What a function changes, wherever it lies: counts it raises, sets it adds to, places it marks.

`field_work` tells this of the fields of one object. Here the whole way is noted, so that a change through
another object can be compared: `self.locked.add(key)` of a server, `self.server.locked.discard(self.key)` of
its lease.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Function
from auditor.source.nodes import children, walk

Way = tuple[str, ...]
"""`("self", "server", "locked")`; a module's own names come after `MODULE`. Keys and indices are left out."""

SELF = "self"
MODULE = "<module>"
LONGEST = 5

_INTO = frozenset({"add", "append", "appendleft", "insert", "push", "put", "put_nowait", "extend", "update"})
_OUT_OF = frozenset({"remove", "discard", "pop", "popleft", "popitem", "get_nowait", "difference_update"})
_SHOWING = frozenset({"get", "setdefault", "values", "items", "keys"})
_GOING_OVER = frozenset({"enumerate", "list", "reversed", "sorted", "tuple", "zip", "iter"})


class Did(Enum):
    """What was done at the end of the way."""

    MORE = "counted up"
    LESS = "counted down"
    IN = "put in, or marked"
    OUT = "taken out"
    CLEAR = "unmarked"
    SET = "set to something that was kept"


UNDONE_BY: dict[Did, frozenset[Did]] = {
    Did.MORE: frozenset({Did.LESS, Did.SET}),
    Did.LESS: frozenset({Did.MORE}),
    Did.IN: frozenset({Did.OUT, Did.CLEAR}),
    Did.OUT: frozenset({Did.IN}),
}


@dataclass(frozen=True, slots=True)
class Change:
    """`value` is what was put in, taken out, set, or counted by."""

    way: Way
    did: Did
    value: ast.expr | None = None


def changes(function: Function) -> list[Change]:
    """In the order of the text; what its own helpers change is theirs."""
    if isinstance(function.node, (ast.Module, ast.Lambda)):
        return []
    ways = Ways(function)
    return [change for node in function.statements for change in _of_statement(ways, node)]


def all_changes(function: Function) -> Iterator[Change]:
    """With those of the helpers that it calls on its own object."""
    yield from changes(function)
    helpers = function.cls.methods if function.cls is not None else {}
    for call in function.calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                owner == function.owner and name in helpers and helpers[name] is not function
            ):
                yield from (each for each in changes(helpers[name]) if each.way[0] in (SELF, MODULE))


class Ways:
    """Where the names of a function lead: parameters, the module's names, and locals for parts of these."""

    def __init__(self, function: Function) -> None:
        self.sums: dict[str, ast.BinOp] = {}  # `left = self.used[key] - n`
        self.known: dict[str, Way] = {name: (MODULE, name) for name in function.module.assigned}
        self.known.update((name, (name,)) for name in function.parameters)
        if function.owner is not None:
            self.known[function.owner] = (SELF,)
        for node in function.statements:
            self._note(node)

    def _note(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            if (way := self.of(node.iter)) is not None:
                names = [each.id for each in walk(node.target) if isinstance(each, ast.Name)]
                self.known.update((name, way) for name in names[-1:])
            return
        for target, value in assigned_by(node):
            if isinstance(target, ast.Name):
                if isinstance(value, ast.BinOp):
                    self.sums[target.id] = value
                leads = isinstance(value, (ast.Attribute, ast.Subscript, ast.Call))
                way = self.of(value) if leads else None
                if way is not None:
                    self.known[target.id] = way
                elif self.known.get(target.id, (MODULE,))[0] == MODULE:
                    self.known.pop(target.id, None)  # a local of the same name

    def of(self, node: ast.expr) -> Way | None:
        """The way to it, elements being at the way of what holds them."""
        match node:
            case ast.Name(id=name):
                return self.known.get(name)
            case ast.Attribute(value=value, attr=attr):
                way = self.of(value)
                return (*way, attr) if way is not None and len(way) < LONGEST else None
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self.of(value)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _SHOWING:
                return self.of(value)
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _GOING_OVER:
                return self.of(first)
        return None


def _of_statement(ways: Ways, node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
            yield from _at(ways, target, Did.MORE if isinstance(op, ast.Add) else Did.LESS, value)
        case ast.AugAssign(target=target, op=ast.BitOr(), value=value):
            yield from _at(ways, target, Did.IN, value)
        case ast.AugAssign(target=target, op=ast.BitAnd(), value=ast.UnaryOp(op=ast.Invert(), operand=value)):
            yield from _at(ways, target, Did.OUT, value)
        case ast.Delete(targets=targets):
            for gone in targets:
                if isinstance(gone, ast.Subscript):
                    yield from _at(ways, gone, Did.OUT, gone.slice)
        case ast.Assign() | ast.AnnAssign():
            for written, given in assigned_by(node):
                if isinstance(written, (ast.Attribute, ast.Subscript)):
                    yield from _at(ways, written, *_given(ways, written, given))
    for call in _calls(node):
        yield from _called(ways, call)


def _at(ways: Ways, target: ast.expr, did: Did, value: ast.expr | None) -> Iterator[Change]:
    if (way := ways.of(target)) is not None:
        yield Change(way, did, value)


def _given(ways: Ways, target: ast.Attribute | ast.Subscript, value: ast.expr) -> tuple[Did, ast.expr]:
    """`count[key] = count.get(key, 0) + 1` counts up, `busy[n] = None` and `page.busy = False` unmark."""
    value = ways.sums.get(value.id, value) if isinstance(value, ast.Name) else value
    match value:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=more) if _shows(ways, left, target):
            return (Did.MORE if isinstance(op, ast.Add) else Did.LESS), more
        case ast.Constant(value=None | False | 0):
            return Did.CLEAR, value
        case _ if isinstance(target, ast.Subscript) or isinstance(value, ast.Constant):
            return Did.IN, value
    return Did.SET, value


def _shows(ways: Ways, node: ast.expr, target: ast.Attribute | ast.Subscript) -> bool:
    """`counts.get(key, 0)` and `counts[key]` of `counts`, a name for that, `self.next` of itself."""
    place = target.value if isinstance(target, ast.Subscript) else target
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr="get")) | ast.Subscript(value=inner):
            return ast.unparse(inner) == ast.unparse(place)
        case ast.Name() if isinstance(target, ast.Subscript):
            return ways.of(node) == ways.of(place) is not None
    return ast.unparse(node) == ast.unparse(place)


def _called(ways: Ways, call: ast.Call) -> Iterator[Change]:
    match call:
        case ast.Call(func=ast.Attribute(attr="heappush") | ast.Name(id="heappush"), args=[heap, thing]):
            yield from _at(ways, heap, Did.IN, thing)
        case ast.Call(func=ast.Attribute(attr="heappop") | ast.Name(id="heappop"), args=[heap]):
            yield from _at(ways, heap, Did.OUT, call)
        case ast.Call(func=ast.Attribute(value=place, attr=attr), args=args) if attr in _INTO and args:
            yield from _at(ways, place, Did.IN, args[-1])
        case ast.Call(func=ast.Attribute(value=place, attr=attr), args=args) if attr in _OUT_OF:
            yield from _at(ways, place, Did.OUT, args[0] if args else call)


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Those of its own expressions; statements within it come by themselves."""
    waiting: list[ast.AST] = list(_parts(statement))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        waiting += [child for child in children(node) if not isinstance(child, ast.stmt)]


def _parts(statement: ast.stmt) -> Sequence[ast.AST]:
    nested = (ast.stmt, ast.excepthandler, ast.match_case)
    return [child for child in children(statement) if not isinstance(child, nested)]
