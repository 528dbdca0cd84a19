"""Where the names of a function lead: to parameters, to the module's names, to parts of these.

`field_work` tells of the fields of one object. Here the whole way is noted, so that a change through another
object can be compared: `self.locked.add(key)` of a server, `self.server.locked.discard(self.key)` of its
lease.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Function
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk

Way = tuple[str, ...]
"""`("self", "server", "locked")`; a module's own names come after `MODULE`. Keys and indices are left out."""

SELF = "self"
MODULE = "<module>"
LONGEST = 5
DEEPEST = 3
"""So many helpers one in another are asked."""

_SHOWING = frozenset({"get", "setdefault", "values", "items", "keys", "copy"})
_GOING_OVER = frozenset({"enumerate", "list", "reversed", "sorted", "tuple", "zip", "iter", "next", "min",
                         "max"})  # fmt: skip

SHOWN = (ast.Return, ast.Yield)

LEADING = (ast.Attribute, ast.Subscript, ast.Call, ast.IfExp, ast.ListComp, ast.BoolOp)


class Helpers(dict[str, Function]):
    """Methods that a method may call on its own object, with what each of them shows, once somebody asked: a
    class of a hundred methods that call each other is read a hundred times otherwise."""

    def __init__(self, methods: Mapping[str, Function]) -> None:
        super().__init__(methods)
        self.shown: dict[tuple[Function, int], Way | None] = {}


class Ways:
    """Of one function."""

    def __init__(self, function: Function, helpers: Helpers | None = None, deep: int = 0) -> None:
        self.function, self.deep = function, deep
        own = function.cls.methods if function.cls is not None else {}
        self.helpers = Helpers(own) if helpers is None else helpers
        self.sums: dict[str, ast.BinOp] = {}  # `left = self.used[key] - n`
        self.parts: dict[str, Way] = {}  # `low` of `for at, (low, high) in enumerate(self.holes):`
        self.of_module = {
            name for node in function.statements if isinstance(node, ast.Global) for name in node.names
        }
        self.known: dict[str, Way] = {name: (MODULE, name) for name in function.module.assigned}
        self.known.update((name, (name,)) for name in function.parameters)
        if function.owner is not None:
            self.known[function.owner] = (SELF,)
        elif function.parent is not None and function.parent.owner is not None:
            self.known.setdefault(function.parent.owner, (SELF,))  # of a closure
        for node in function.statements:
            self._note(node)

    def _note(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            if (way := self.of(node.iter)) is not None:
                names = [each.id for each in walk(node.target) if isinstance(each, ast.Name)]
                self.known.update((name, way) for name in names[-1:])
                self.parts.update((name, way) for name in names)
            return
        for target, value in assigned_by(node):
            if isinstance(target, ast.Name) and target.id not in self.of_module:
                if isinstance(value, ast.BinOp):
                    self.sums[target.id] = value
                leads = isinstance(value, LEADING) or (
                    isinstance(value, ast.Name) and value.id in {*self.of_module, self.function.owner}
                )
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
            case ast.Subscript(value=value, slice=ast.Constant(value=str() as key)):
                way = self.of(value)  # `job["status"]` of a record
                return (*way, key) if way is not None and len(way) < LONGEST else None
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self.of(value)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _SHOWING:
                return self.of(value)
            case ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=owner)]) if (
                owner == self.function.owner
            ):
                return (SELF,)  # what the class has is the object's as well
            case ast.Call(func=ast.Attribute(value=value, attr="pop"), args=[_, *_]):
                return self.of(value)  # `record = self.active.pop(key, None)`, which may be put back
            case ast.Call(func=ast.Name(id=name), args=[*_, last]) if name == "filter":
                return self.of(last)
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _GOING_OVER:
                return self.of(first)
            case (
                ast.GeneratorExp(elt=ast.Name(id=name), generators=[one])
                | ast.ListComp(elt=ast.Name(id=name), generators=[one])
            ) if isinstance(one.target, ast.Name) and one.target.id == name:
                return self.of(one.iter)
            case ast.BoolOp(op=ast.Or(), values=[one, *_]):
                return self.of(one)
            case ast.IfExp(body=one) | ast.Tuple(elts=[one, *_]) | ast.List(elts=[one, *_]):
                return self.of(one)  # the others being alike
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (
                owner == self.function.owner and name in self.helpers
            ):
                return self._shown_by(self.helpers[name])
        return None

    def _shown_by(self, helper: Function) -> Way | None:
        """`self._gates[host]` of `self._gate(host)`, which returns it."""
        if helper is self.function or self.deep >= DEEPEST:
            return None
        asked = (helper, self.deep)
        if asked not in self.helpers.shown:
            self.helpers.shown[asked] = self._way_shown(helper)
        return self.helpers.shown[asked]

    def _way_shown(self, helper: Function) -> Way | None:
        own = Ways(helper, self.helpers, self.deep + 1)
        returned = (node.value for node in helper.nodes if isinstance(node, SHOWN) and node.value)
        found = {way for value in returned if (way := own.of(value)) is not None and way[0] in (SELF, MODULE)}
        return found.pop() if len(found) == 1 else None


def given_by(call: ast.Call, helper: Function) -> dict[str, ast.expr]:
    """What a call on the object itself gives the helper, by the helper's names."""
    given = dict(zip(own_parameters(helper), call.args, strict=False))
    given.update({each.arg: each.value for each in call.keywords if each.arg is not None})
    return given
