"""Pools that lend rows of plain numbers, bytearrays and lists of floats, or empty lists to be filled: a slice
of one, or a list made of it, is a copy, which leads nobody back to what was lent."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import given_to, own_attribute, ways
from auditor.project.code.modules import Function, last_part
from auditor.project.pools.lent_kinds import TAKING, put_into_the_store

ROW = re.compile(
    r"(?:Optional\[)?(?:bytearray|[Ll]ist\[float\]|(?:array\.)?array(?:\[float\])?)\]?(?: \| None)?"
)
"""Annotations of such a row."""

EMPTY = frozenset({"list", "dict", "set", "deque", "Counter", "OrderedDict"})
CONTAINERS = frozenset({"list", "deque"})
ROWS = frozenset({"bytearray", "array"})


def lends_plain_memory(function: Function) -> bool:
    """By its annotation, by what its store was filled with, or by what it makes where that is empty."""
    returns = getattr(function.node, "returns", None)
    if returns is not None:
        return ROW.fullmatch(ast.unparse(returns).strip("'\"")) is not None
    made = [*_in_the_store(function), *_returned(function)]
    made += [each for call in made for each in _by_a_helper(function, call)]
    asked = [each for call in made for each in _asked_of_itself(function, call)]
    made += [*asked, *(each for call in asked for each in _by_a_helper(function, call))]
    if any(isinstance(each, ast.Tuple) for each in made):
        return False
    return any(map(is_row, made)) or _lends_empty_lists(made)


def _lends_empty_lists(made: Sequence[ast.expr]) -> bool:
    """`return self.spare.pop() if self.spare else []`, a list to work with; what `self.free[:n]` returns
    beside `[]` is a list of what is lent."""
    taken = any(isinstance(way, ast.Call) and last_part(way.func) in TAKING for way in made)
    return taken and any(map(_is_empty_container, made))


def _is_empty_container(made: ast.expr) -> bool:
    match made:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
            return name in EMPTY
    return False


def is_row(made: ast.expr) -> bool:
    """`bytearray(size)`, `array("f", [0.0]) * size`, `[0.0] * size`, `[0.0 for _ in range(size)]`"""
    match made:
        case ast.Call(func=maker):
            return last_part(maker) in ROWS
        case ast.BinOp(op=ast.Mult(), left=ast.List(elts=[ast.Constant(value=int() | float())])):
            return True
        case ast.BinOp(op=ast.Mult(), left=ast.Call() as one):
            return is_row(one)
        case ast.ListComp(elt=ast.Constant(value=int() | float())):
            return True
    return False


def _returned(function: Function) -> Iterator[ast.expr]:
    for node in function.statements:
        if isinstance(node, ast.Return) and node.value is not None:
            for way in ways(node.value):
                yield way
                for value in given_to(function, way.id) if isinstance(way, ast.Name) else ():
                    yield from ways(value)


def _by_a_helper(function: Function, made: ast.expr) -> Iterator[ast.expr]:
    """`_new(size)`, which makes a list of numbers where there is no library of tensors."""
    match made:
        case ast.Call(func=ast.Name(id=name)) if helper := function.module.functions.get(name):
            yield from _returned(helper)


def _asked_of_itself(function: Function, made: ast.expr) -> Iterator[ast.expr]:
    """`return self.borrow(size)` of `try_borrow(size)`."""
    methods = function.cls.methods if function.cls is not None else {}
    name = own_attribute(made.func, function.owner or "") if isinstance(made, ast.Call) else None
    if name is not None and (lending := methods.get(name)):
        yield from (*_in_the_store(lending), *_returned(lending))


def _in_the_store(function: Function) -> Iterator[ast.expr]:
    """The elements of the lists that the method takes from."""
    for put, several in put_into_the_store(function):
        yield from elements(put) if several else [put]


def elements(container: ast.expr) -> list[ast.expr]:
    match container:
        case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
            return [element]
        case ast.List(elts=listed):
            return listed
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name in CONTAINERS:
            return elements(inner)
    return []
