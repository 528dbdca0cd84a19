"""Receivers that are the same object wherever they are spelled alike: `get_pool()`, a module's `STOCK`."""

import ast

from auditor.flow.effects import Acquisition
from auditor.ir.ops import Call, Path

SHARED_POSITION = "<shared>"
"""Followed by the name: stands for what a function may reach without being given it."""


def spelled(method: ast.expr) -> Path | None:
    """Whose method it is: `get_pool()`, `self.pool_of(rank)`, `Pool.instance().rows` and
    `(self.small if n < 8 else self.large)`, asked for once more wherever they are needed."""
    if not isinstance(method, ast.Attribute):
        return None
    base = receiver = method.value
    while isinstance(base, ast.Attribute):
        base = base.value
    match base:
        case ast.Call(args=args, keywords=[]) if all(map(_is_named, (base.func, *args))) and not _makes(base):
            return ("@" + ast.unparse(receiver),)
        case ast.IfExp(body=one, orelse=other) if _is_named(one) and _is_named(other):
            return ("@" + ast.unparse(receiver),)
    return None


def is_spelled(place: Path) -> bool:
    return place[0][0] == "@" and not place[0][1:].isidentifier()


def shared_place(acquisition: Acquisition) -> Path | None:
    """Where the object lies that was asked, if any function of the module reaches it under that name."""
    return next((place for place in acquisition.places if place[0][0] == "@"), None)


def asks(call: Call, place: Path) -> bool:
    """Whether the call is one of a method of the object so spelled."""
    func = call.at.func
    return is_spelled(place) and isinstance(func, ast.Attribute) and _is(func.value, place)


def gives(call: Call, place: Path) -> bool:
    """Whether the call is what is spelled so: `pool = get_pool()`."""
    return is_spelled(place) and _is(call.at, place)


def leads(call: Call, place: Path) -> bool:
    """Whether the call is a part of what is spelled so, and has worked once already."""
    return is_spelled(place) and place[0].startswith("@" + ast.unparse(call.at))


def _is(node: ast.expr, place: Path) -> bool:
    return isinstance(node, ast.Call | ast.Attribute | ast.IfExp) and "@" + ast.unparse(node) == place[0]


def _makes(call: ast.Call) -> bool:
    """`Louder(lanes).play(data)` is asked of a new one each time."""
    func = call.func
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    return name.lstrip("_")[:1].isupper()


def _is_named(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name | ast.Constant)
