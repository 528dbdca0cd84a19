"""A class of the tree whose objects hold something open until they are told to close it: a client, a store.

Whoever makes such an object for himself owes its end. Objects that are kept (in a field, by a module, by a
function that was given them) are not asked about: they may be meant to last as long as the process.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from auditor.project.code.bindings import TEST_FILE, given_to, own_attribute
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.code.release_names import looks_releasing
from auditor.protocols.vocabulary import split

MAKING = frozenset({"make", "create", "build", "new"})
"""First words of the names of functions that make an object for whoever calls them."""

LASTING = frozenset({"main", "_main", "<module>"})
"""Functions with which the process ends."""


@dataclass(slots=True)
class Opener:
    """`opening` are the methods that fill a field, or call one that does; `closing` release it. `unless` are
    parameters of `__init__`: whoever brings his own buffer, or says that he is `lazy`, has opened nothing."""

    cls: Class
    fields: set[str]
    opening: set[str]
    closing: set[Function]
    unless: frozenset[str] = frozenset()

    def is_opened(self, function: Function, call: ast.Call, by: Function | None) -> bool:
        """By being made, or by the first call of a method of an object that this function made; who gives
        the field itself away may end that."""
        if by is None:
            made_open = "__init__" in self.opening and not self._is_brought(call)
            return made_open and not self._field_given(function, _attributes_of(function, call))
        if (
            "__init__" in self.opening
            or by.name not in self.opening
            or not isinstance(call.func, ast.Attribute)
        ):
            return False
        made = call.func.value
        if isinstance(made, ast.Call):
            return _makes(made)
        given = list(given_to(function, made.id)) if isinstance(made, ast.Name) else []
        makers = [each for each in given if isinstance(each, ast.Call) and _makes(each)]
        if not given or len(makers) < len(given):
            return False
        used = [node for each in makers for node in _attributes_of(function, each)]
        opening = [node for node in used if node.attr in self.opening]
        first = min(opening, key=lambda node: (node.lineno, node.col_offset), default=None)
        return first is call.func and not self._field_given(function, used)

    def says(self) -> frozenset[tuple[str, bool]]:
        """What the object says of itself while it holds something: `ticket.slot`, and `ticket.ok`, a property
        that asks `self.slot is not None`. Of several things it may hold one and not the others."""
        if len(self.fields) != 1:
            return frozenset()
        (field,) = self.fields
        found = {(f".{field} is None", False)}
        for name, method in self.cls.methods.items():
            if method.is_property and (truth := _asks(method, field)) is not None:
                found.add((f".{name}", truth))
        return frozenset(found)

    def _is_brought(self, call: ast.Call) -> bool:
        """One of the parameters that decide is told, or may be."""
        init = self.cls.methods.get("__init__")
        if not self.unless or init is None:
            return False
        parameters = init.parameters[1 : len(call.args) + 1]
        told = {*parameters, *(keyword.arg for keyword in call.keywords)}
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        return starred or None in told or not self.unless.isdisjoint(told - {None})

    def _field_given(self, function: Function, used: Iterable[ast.Attribute]) -> bool:
        given = _given_away(function)
        return any(node.attr in self.fields and id(node) in given for node in used)


def _asks(method: Function, field: str) -> bool | None:
    """What a method answers that only says whether there is anything in the field."""
    match method.node.body:
        case [
            *_,
            ast.Return(value=ast.Compare(left=asked, ops=[op], comparators=[ast.Constant(value=None)])),
        ]:
            alone = sum(isinstance(each, ast.Return) for each in method.statements) == 1
            if alone and own_attribute(asked, method.owner or "") == field:
                return {ast.IsNot: True, ast.Is: False}.get(type(op))
    return None


def _makes(call: ast.Call) -> bool:
    """`Client(address)`, `self.make_client()`"""
    name = last_part(call.func)
    return name.lstrip("_")[:1].isupper() or not MAKING.isdisjoint(split(name)[:1])


def ends_with_the_process(function: Function) -> bool:
    """Not before long, at least: a script's, or a test's."""
    return function.name in LASTING or TEST_FILE.search(function.module.path) is not None


def _given_away(function: Function) -> set[int]:
    """Nodes that are returned, kept under another name, or an operand of a call that looks like an end."""
    found: set[int] = set()
    for node in function.nodes:
        match node:
            case (
                ast.Return(value=ast.expr() as value)
                | ast.Assign(value=value)
                | ast.Yield(value=ast.expr() as value)
            ):
                found.add(id(value))
            case ast.Call(func=ast.Attribute(value=owner), args=args) if looks_releasing(node):
                found.update(map(id, (owner, *args)))
            case ast.Call(args=args) if looks_releasing(node):
                found.update(map(id, args))
            case ast.withitem(context_expr=value):
                found.add(id(value))
    return found


def _attributes_of(function: Function, call: ast.Call) -> Iterator[ast.Attribute]:
    """What the function reads of the object that this call makes."""
    names = {
        target.id
        for node in function.nodes
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in function.nodes:
        if isinstance(node, ast.Attribute) and (
            node.value is call or getattr(node.value, "id", None) in names
        ):
            yield node
