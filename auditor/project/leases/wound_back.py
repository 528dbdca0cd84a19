"""Arenas that are wound back to a mark, which ends all that was taken since.

    mark = self.arena.mark()
    node = self.arena.new_node()
    ...
    self.arena.rewind(mark)

What the names of such a lease are meanwhile does not matter: it lies in the arena until then.
"""

import ast
from collections.abc import Iterator, Set

from auditor.ir.ops import Call
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk


def wound_back_at(
    function: Function, recogniser: Recogniser, begun: ast.Call, protocol: str
) -> frozenset[int]:
    """The nodes that wind the pool back to a mark which was set before `begun`."""
    ends = {
        id(back)
        for back in function.calls
        if _winds_back(recogniser, function, back, protocol)
        and not (last_name(begun) in recogniser.taking_names(protocol) and _asked(begun) != _asked(back))
        for mark in _marks(function, back)
        if mark.lineno < begun.lineno and last_name(mark) not in recogniser.taking_names(protocol)
    }
    if not ends:
        return frozenset()
    return frozenset(
        n for n, op in enumerate(function.graph.ops) if isinstance(op, Call) and id(op.at) in ends
    )


def wound_back_by_others(function: Function, recogniser: Recogniser, begun: ast.Call, protocol: str) -> bool:
    """In a `with` whose end winds the pool back, or by another method of the class, to a mark that this has
    in a field."""
    pool = recogniser.owner_of(protocol)
    if pool is None or not any(map(_cuts_off, pool.methods.values())):
        return False
    for node in function.nodes:
        if isinstance(node, ast.With | ast.AsyncWith) and any(each is begun for each in walk(node)):
            entered = (item.context_expr for item in node.items)
            taking = recogniser.taking_names(protocol)
            if any(_ends_by_winding_back(pool, each, taking) for each in entered):
                return True
    others = list(function.cls.methods.values()) if function.cls is not None else []
    marked = {field for other in others for field in _fields_with_marks(other, recogniser, protocol)}
    return any(
        own_attribute(call.args[0], other.owner or "") in marked
        and _winds_back(recogniser, other, call, protocol)
        for other in others
        for call in other.calls
        if call.args
    )


def _ends_by_winding_back(pool: Class, entered: ast.expr, taking: Set[str]) -> bool:
    """`arena.scope()`, a context manager of the pool that takes nothing, and winds it back."""
    scope = pool.methods.get(last_name(entered)) if isinstance(entered, ast.Call) else None
    backs = {name for name, method in pool.methods.items() if _cuts_off(method)}
    asked = {last_name(call) for call in scope.calls} if scope is not None else set()
    return not backs.isdisjoint(asked) and asked.isdisjoint(taking)


def _fields_with_marks(method: Function, recogniser: Recogniser, protocol: str) -> Iterator[str]:
    """`depth` of `self.depth = self.stack.checkpoint()`."""
    pool, taking = recogniser.owner_of(protocol), recogniser.taking_names(protocol)
    for target, value in assignments(method):
        field = own_attribute(target, method.owner or "")
        if field is not None and isinstance(value, ast.Call) and pool is not None:
            mark = pool.methods.get(last_name(value))
            if mark is not None and mark.name not in taking:
                yield field


def _winds_back(recogniser: Recogniser, function: Function, call: ast.Call, protocol: str) -> bool:
    pool = recogniser.owner_of(protocol)
    back = pool.methods.get(last_name(call)) if pool is not None else None
    if back is None or not call.args:
        return False
    return _cuts_off(back) and back in recogniser.calls.targets(function, call)[0]


def _cuts_off(back: Function) -> bool:
    """`del self.order[mark:]`, `while len(self.order) > mark:`, `self.top = mark` of the mark that it is
    told."""
    told = own_parameters(back)[:1]
    for node in back.nodes if told else ():
        match node:
            case ast.Slice(lower=ast.Name(id=name), upper=None) if name == told[0]:
                return True
            case ast.While(test=ast.Compare(left=ast.Call(), comparators=[ast.Name(id=name)])) if (
                name == told[0]
            ):
                return True
            case ast.Assign(targets=[ast.Attribute()], value=ast.Name(id=name)) if name == told[0]:
                return True
    return False


def _marks(function: Function, back: ast.Call) -> Iterator[ast.Call]:
    """The calls of the same pool whose answer it is wound back to."""
    for target, value in assignments(function):
        match target, value:
            case ast.Name(id=name), ast.Call(func=ast.Attribute()) as mark:
                told = isinstance(back.args[0], ast.Name) and back.args[0].id == name
                if told and _asked(mark) == _asked(back):
                    yield mark


def _asked(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
