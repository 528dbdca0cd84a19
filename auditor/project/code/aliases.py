"""Names that stand for a method: `take = pool.acquire`, `take = partial(pool.acquire)`, `self.take = ...`, or
for one of two: `take = pool.large if wide else pool.small`."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from auditor.project.code.modules import Class, Function

_METHOD = re.compile(r"=[ \t]*(?:(?:functools\.)?partial\([ \t]*)?(?:\w+\.)+(\w+)[ \t]*(?=[,)#\n]|$|if )")
_ALIAS = re.compile(r"\b(\w+)[ \t]*(?::[^=\n]+)?$")

Meant = tuple[Function, ast.Call]
"""The function in whose words the call is now written, and the call as it would be without the alias."""


def other_names(sources: Mapping[str, str], paths: Iterable[str]) -> dict[str, set[str]]:
    """By the last name of a method, the names that some file binds to a method so called."""
    found: dict[str, set[str]] = {}
    for path in paths:
        text = sources[path]
        for method in _METHOD.finditer(text):  # from its rare half on: what is bound is then looked up
            alias = _ALIAS.search(text, text.rfind("\n", 0, method.start()) + 1, method.start())
            if alias and alias[1] != method[1]:
                found.setdefault(method[1], set()).add(alias[1])
    return found


class Aliases:
    """Looks through one binding; a name that is bound twice means nothing."""

    def __init__(self) -> None:
        self._locals: dict[Function, dict[str, ast.expr | None]] = {}
        self._fields: dict[Class, dict[str, tuple[Function, ast.expr] | None]] = {}
        self._meant: dict[int, Meant | None] = {}
        self._keep: list[ast.Call] = []

    def meant(self, function: Function, call: ast.Call) -> Meant | None:
        """What a call through such a name says without it; None where it is no such call."""
        if id(call) not in self._meant:
            self._keep.append(call)
            self._meant[id(call)] = self._without_alias(function, call)
        return self._meant[id(call)]

    def _without_alias(self, function: Function, call: ast.Call) -> Meant | None:
        found = self._binding(function, call.func)
        if found is None:
            return None
        scope, value = found
        if isinstance(value, ast.Call):
            return scope, _applied(value, call)
        return scope, ast.copy_location(ast.Call(value, call.args, call.keywords), call)

    def _binding(self, function: Function, node: ast.expr) -> tuple[Function, ast.expr] | None:
        match node:
            case ast.Name(id=name):
                scope: Function | None = function
                while scope is not None:
                    value = self._names(scope).get(name)
                    if value is not None:
                        return scope, value
                    scope = scope.parent
            case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                cls = function.cls
                if cls is not None and function.parameters[:1] == (owner,) and attr not in cls.methods:
                    return self._attributes(cls).get(attr)
        return None

    def _names(self, function: Function) -> dict[str, ast.expr | None]:
        if function not in self._locals:
            bound: dict[str, ast.expr | None] = {}
            for target, value in _bindings(function):
                if isinstance(target, ast.Name):
                    bound[target.id] = _one_more(bound[target.id], value) if target.id in bound else value
            self._locals[function] = {name: each for name, each in bound.items() if _stands_for(each)}
        return self._locals[function]

    def _attributes(self, cls: Class) -> dict[str, tuple[Function, ast.expr] | None]:
        if cls not in self._fields:
            self._fields[cls] = bound = {}
            for method in cls.methods.values():
                for target, value in _bindings(method):
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        once = target.attr not in bound and _stands_for(value)
                        bound[target.attr] = (method, value) if once else None
        return self._fields[cls]


def _bindings(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in function.statements:
        match node:
            case ast.Assign(targets=[target], value=value):
                yield target, value
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield target, value


def _one_more(before: ast.expr | None, value: ast.expr) -> ast.expr | None:
    """`take = pool.small`, and in another branch `take = pool.large`."""
    if not (isinstance(before, ast.Attribute | ast.IfExp) and isinstance(value, ast.Attribute)):
        return None
    return ast.IfExp(ast.Constant(None), before, value)


def _stands_for(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return all(isinstance(way, ast.Attribute) or _stands_for(way) for way in (value.body, value.orelse))
    if isinstance(value, ast.Call) and value.args:
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name == "partial" and isinstance(value.args[0], ast.Attribute)
    return isinstance(value, ast.Attribute)


def _applied(partial: ast.Call, call: ast.Call) -> ast.Call:
    whole = ast.Call(partial.args[0], [*partial.args[1:], *call.args], [*partial.keywords, *call.keywords])
    return ast.copy_location(whole, call)
