"""Methods of a pool that take back all that it has lent at once, told nothing: `self._bits = 0`,
`self._free = list(range(self.n))`, `self._busy.clear()`. Whatever they are called, nobody owes it anything
afterwards."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.full_at_first import INITIAL
from auditor.project.shapes.markings import is_nothing
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk

EMPTY = frozenset({"{}", "[]", "dict()", "list()", "set()", "deque()", "OrderedDict()", "Counter()"})
FILLING = frozenset({"extend", "update"})


def renewing(takers: Sequence[Function]) -> frozenset[Function]:
    """The methods beside those takers that begin the books of their pool anew, by what the takers do."""
    works = [field_work(taker) for taker in takers]
    idle = {name for work in works for name, _ in work.taken}
    used = {mark.field for work in works for mark in work.marked if mark.on}
    used |= {put.field for work in works for put in work.put} | {n for w in works for n, _ in w.counted}
    return frozenset(
        method
        for pool in {taker.cls for taker in takers if taker.cls is not None}
        for name, method in pool.methods.items()
        if name not in INITIAL and method not in takers and method.owner and not own_parameters(method)
        if any(_is_full(field, value) for field, value in _given(method) if field in idle)
        or any(_is_blank(value) for field, value in _given(method) if field in used - idle)
    )


Given = tuple[str, ast.expr | None]
"""A field with all that it has from now on; None where it was emptied."""


def _given(method: Function) -> Iterator[Given]:
    own = method.owner or ""
    for node in method.statements:
        for target, value in assigned_by(node):
            if (field := own_attribute(target, own)) is not None:
                yield field, value
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=store, attr="clear"))):
                if (field := own_attribute(store, own)) is not None:
                    yield field, None
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=store, attr=way), args=[more])):
                if way in FILLING and (field := own_attribute(store, own)) is not None:
                    yield field, more
            case ast.For(target=ast.Name(id=place), body=[ast.Assign(targets=[to], value=value)]):
                match to:
                    case ast.Subscript(value=store, slice=ast.Name(id=at)) if at == place:
                        if (field := own_attribute(store, own)) is not None:
                            yield field, value


def _is_full(field: str, value: ast.expr | None) -> bool:
    """Of what is idle it has all again, and not what is left of it."""
    if value is None or _is_blank(value):
        return False
    return not any(isinstance(node, ast.Attribute) and node.attr == field for node in walk(value))


def _is_blank(value: ast.expr | None) -> bool:
    """Nothing of it is in use: `0`, `set()`, `[False] * self.n`"""
    match value:
        case ast.ListComp(elt=each) | ast.DictComp(value=each):
            return is_nothing(each)
    return value is None or is_nothing(value) or ast.unparse(value) in EMPTY
