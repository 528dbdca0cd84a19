"""Pools told by their shape: what one method takes out of a free list, another one puts back into it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.project.bindings import own_attribute, own_name, statements_of
from auditor.project.modules import Function
from auditor.project.pool_state import REMOVERS, own_parameters
from auditor.protocols.vocabulary import split

FREE = frozenset({"free", "freelist", "idle", "available", "avail", "unused", "spare", "vacant"})
"""Words in the names of fields that hold what nobody uses."""

MENTIONED = re.compile(r"\.\w*(?:free|idle|avail|unused|spare|vacant)\w*(?:\.(?:pop|append|add|put|get)|\[)")
"""A text without it has no class of that shape."""

TAKING = REMOVERS - {"remove", "discard"}
FILLING = frozenset({"append", "appendleft", "add", "put", "put_nowait", "insert", "push", "extend",
                     "extendleft", "update", "append_n"})  # fmt: skip
SHRINKING = re.compile(
    r"_*(?:evict|drain|clear|empty|purge|trim|shrink|prune|expire|close|shutdown|remove|discard)"
)
"""Names of methods that take out of a free list what is to go for good."""


@dataclass(frozen=True, slots=True)
class FreeList:
    """The methods that hand out what is in one field, and those that are given it back."""

    takers: tuple[Function, ...]
    givers: tuple[Function, ...]


def free_lists(methods: list[Function]) -> Iterator[FreeList]:
    """One for each such field of a class, of which these are methods."""
    for attribute in sorted({attribute for method in methods for attribute in _free_fields(method)}):
        takers = [method for method in methods if _hands_out(method, attribute)]
        givers = [method for method in methods if _is_given(method, attribute)]
        takers = [method for method in takers if not _puts_back(method, attribute)]
        givers = [method for method in givers if method not in takers]
        if takers and givers:
            yield FreeList(tuple(takers), tuple(givers))


def _free_fields(method: Function) -> set[str]:
    own = own_name(method)
    return {
        node.attr
        for node in ast.walk(method.node)
        if isinstance(node, ast.Attribute) and own is not None and own_attribute(node, own) is not None
        if not FREE.isdisjoint(split(node.attr))
    }


def _hands_out(method: Function, attribute: str) -> bool:
    """It returns what it has taken out of the field."""
    if SHRINKING.match(method.name) or method.name.startswith("__"):
        return False
    taken = [node for node in ast.walk(method.node) if _takes(node, attribute)]
    if not taken:
        return False
    marked = {id(node) for node in taken}
    names = _derived(method, frozenset(), marked)
    returned = [node.value for node in statements_of(method.node) if isinstance(node, ast.Return)]
    return any(value is not None and _mentions(value, names, marked) for value in returned)


def _takes(node: ast.AST, attribute: str) -> bool:
    """`self.free.pop()`, `heappop(self.free)`, `self.free[:n]`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=attr), attr=name)):
            return attr == attribute and name in TAKING
        case ast.Call(
            func=ast.Attribute(attr="heappop") | ast.Name(id="heappop"), args=[ast.Attribute(attr=attr)]
        ):
            return attr == attribute
        case ast.Subscript(value=ast.Attribute(attr=attr), slice=ast.Slice(lower=None), ctx=ast.Load()):
            return attr == attribute
    return False


def _is_given(method: Function, attribute: str) -> bool:
    """It puts into the field what it is told."""
    told = frozenset(own_parameters(method))
    if not told or method.name.startswith("__"):
        return False
    names = _derived(method, told, set())
    return any(_mentions(given, names, set()) for given in _put(method, attribute))


def _puts_back(method: Function, attribute: str) -> bool:
    """Whoever it hands something owes nothing: it takes the first, to put it last."""
    return any(True for _ in _put(method, attribute))


def _put(method: Function, attribute: str) -> Iterator[ast.expr]:
    """What a method puts into the field."""
    for node in ast.walk(method.node):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=attr), attr=name), args=[*_, given]):
                if attr == attribute and name in FILLING:
                    yield given
            case (
                ast.Call(
                    func=ast.Attribute(attr="heappush") | ast.Name(id="heappush"),
                    args=[ast.Attribute(attr=attr), given],
                )
                | ast.AugAssign(target=ast.Attribute(attr=attr), op=ast.Add(), value=given)
            ):
                if attr == attribute:
                    yield given


def _derived(method: Function, names: frozenset[str], marked: set[int]) -> frozenset[str]:
    """Local names that are given, or go over, something that has to do with these."""
    found = set(names)
    before = -1
    while before != len(found):
        before = len(found)
        for node in statements_of(method.node):
            match node:
                case ast.Assign(targets=targets, value=value) if _mentions(value, found, marked):
                    found |= {name for target in targets for name in _bound(target)}
                case ast.AnnAssign(target=target, value=ast.expr() as value) if _mentions(
                    value, found, marked
                ):
                    found |= set(_bound(target))
                case ast.For(target=target, iter=value) if _mentions(value, found, marked):
                    found |= set(_bound(target))
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=way), args=[*_, value])
                ) if way in FILLING and _mentions(value, found, marked):
                    found.add(name)
    return frozenset(found)


def _bound(target: ast.expr) -> Iterator[str]:
    return (
        node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def _mentions(node: ast.AST, names: frozenset[str] | set[str], marked: set[int]) -> bool:
    return any(
        id(inner) in marked or (isinstance(inner, ast.Name) and inner.id in names) for inner in ast.walk(node)
    )
