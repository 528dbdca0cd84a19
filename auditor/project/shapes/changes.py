"""What a function changes, wherever it lies: counts it raises, sets it adds to, places it marks."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.born_as import is_born_as
from auditor.project.shapes.markings import is_nothing, state_of
from auditor.project.shapes.pieces import joins, left_out
from auditor.project.shapes.ways import DEEPEST, MODULE, SELF, Helpers, Way, Ways, given_by
from auditor.source.nodes import walk

Target = ast.Attribute | ast.Subscript | ast.Name

_INTO = frozenset({"add", "append", "appendleft", "insert", "push", "put", "put_nowait", "extend", "update",
                   "lpush", "rpush", "sadd", "zadd", "hset"})  # fmt: skip
_OUT_OF = frozenset({"remove", "discard", "pop", "popleft", "popitem", "get_nowait", "difference_update",
                     "subtract", "lpop", "rpop", "spop", "srem", "zrem", "hdel"})  # fmt: skip
"""With what Redis calls them, for a store of another process."""


class Did(Enum):
    """What was done at the end of the way."""

    MORE = "counted up"
    LESS = "counted down"
    IN = "put in, or marked"
    OUT = "taken out"
    CLEAR = "unmarked"
    SET = "set to something that was kept"
    HELD = "a lock, or one of a semaphore's places, taken"
    LEFT = "a lock, or one of a semaphore's places, left"


UNDONE_BY: dict[Did, frozenset[Did]] = {
    Did.MORE: frozenset({Did.LESS, Did.SET}),
    Did.LESS: frozenset({Did.MORE}),
    Did.IN: frozenset({Did.OUT, Did.CLEAR}),
    Did.OUT: frozenset({Did.IN, Did.MORE}),  # `free += pages`
    Did.HELD: frozenset({Did.LEFT}),
}

CONTAINERS = (ast.List, ast.ListComp, ast.Set, ast.SetComp)

_HOLDING = {"acquire": Did.HELD, "release": Did.LEFT}

EVENTS = frozenset({"wait", "clear", "set", "is_set"})

_COUNTING = {"incr": Did.MORE, "incrby": Did.MORE, "decr": Did.LESS, "decrby": Did.LESS}

OTHER_WAY = {Did.MORE: Did.LESS, Did.LESS: Did.MORE}


@dataclass(frozen=True, slots=True)
class Change:
    """`value` is what was put in, taken out, set, or counted by; `within` where that was done to a part of
    what the way leads to, `self.inbox[key].get()`, and not to the whole, `self.inbox.pop(key)`; None of a
    local name, which may be either."""

    way: Way
    did: Did
    value: ast.expr | None = None
    within: bool | None = None


def changes(function: Function, ways: Ways | None = None) -> list[Change]:
    """In the order of the text; what its own helpers change is theirs."""
    if isinstance(function.node, (ast.Module, ast.Lambda)):
        return []
    ways = ways or Ways(function)
    found = [change for node, calls in function.worded for change in _of_statement(ways, node, calls)]
    return [*found, *_read_at_a_number(ways, function, found), *_events(ways, function)]


def _read_at_a_number(ways: Ways, function: Function, found: Sequence[Change]) -> Iterator[Change]:
    """`place = self.ring[self.tail % self.size]` where `self.tail` is moved on takes out of the ring."""
    counted = {change.way for change in found if change.did in (Did.MORE, Did.LESS)}
    for node in function.nodes if counted else ():
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            parts = (each for each in walk(node.slice) if isinstance(each, ast.Attribute | ast.Name))
            if any(ways.of(each) in counted for each in parts):
                yield from _at(ways, node.value, Did.OUT, node)


def _events(ways: Ways, function: Function) -> Iterator[Change]:
    """`self.ready[side].wait()`, and `self.ready[side].clear()`: nobody else goes on until `set()`."""
    called = [
        (ways.of(call.func.value), call.func.attr, call)
        for call in function.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in EVENTS and not call.args
    ]
    waited = {way for way, attr, _ in called if attr in ("wait", "is_set")}
    for way, attr, call in called:
        if way is not None and attr == "clear" and way in waited:
            yield Change(way, Did.HELD, call)
        elif way is not None and attr == "set":
            yield Change(way, Did.LEFT, call)


def all_changes(function: Function, helpers: Helpers | None = None, deep: int = 0) -> Iterator[Change]:
    """With those of the helpers that it calls on its own object, by what they are given."""
    if isinstance(function.node, (ast.Module, ast.Lambda)):
        return
    ways = Ways(function, helpers)
    yield from changes(function, ways)
    for call in function.calls if deep < DEEPEST else ():
        match call.func:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                owner == function.owner and name in ways.helpers and ways.helpers[name] is not function
            ):
                helper = ways.helpers[name]
                given = given_by(call, helper)
                for change in all_changes(helper, helpers, deep + 1):
                    yield from _seen_from(ways, change, given)


def _seen_from(ways: Ways, change: Change, given: Mapping[str, ast.expr]) -> Iterator[Change]:
    """`node.pins += delta` of a helper that is told `node` and `-1`."""
    value = given.get(change.value.id, change.value) if isinstance(change.value, ast.Name) else change.value
    if change.way[0] in (SELF, MODULE):
        yield _signed(replace(change, value=value))
    elif (told := given.get(change.way[0])) is not None and (way := ways.of(told)) is not None:
        yield _signed(replace(change, way=(*way, *change.way[1:]), value=value))


def _signed(change: Change) -> Change:
    """Of `-1` more there is less."""
    if (
        change.did in OTHER_WAY
        and isinstance(change.value, ast.UnaryOp)
        and isinstance(change.value.op, ast.USub)
    ):
        return replace(change, did=OTHER_WAY[change.did], value=change.value.operand)
    return change


def _of_statement(ways: Ways, node: ast.stmt, calls: Iterable[ast.Call]) -> Iterator[Change]:
    match node:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add() | ast.Sub(), value=value) if _is_its_own(
            ways, name, value
        ):
            return
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
            yield from _at(ways, target, Did.MORE if isinstance(op, ast.Add) else Did.LESS, value)
        case ast.AugAssign(target=target, op=ast.BitOr(), value=value):
            yield from _at(ways, target, Did.IN, value)
        case ast.AugAssign(target=target, op=ast.BitAnd(), value=ast.UnaryOp(op=ast.Invert(), operand=value)):
            yield from _at(ways, target, Did.OUT, value)
        case ast.AugAssign(target=target, op=ast.BitXor(), value=value):
            for did in (Did.IN, Did.OUT):  # whichever of the two it is
                yield from _at(ways, target, did, value)
        case ast.Delete(targets=targets):
            for gone in targets:
                if isinstance(gone, ast.Subscript):
                    yield from _in(ways, gone.value, Did.OUT, gone.slice)
        case ast.Assign() | ast.AnnAssign():
            for written, given in assigned_by(node):
                place = _lasting(ways, written)
                if place is not None:
                    yield from _replaced(ways, place, given)
                    of_part = isinstance(place, ast.Subscript) and isinstance(place.value, ast.Attribute)
                    for change in _at(ways, place, *_given(ways, place, given)):
                        yield replace(change, within=False) if of_part else change
    for call in calls:
        yield from _called(ways, call)


def _replaced(ways: Ways, place: Target, given: ast.expr) -> Iterator[Change]:
    """`self.slots[at] = replace(slot, busy=True)`, and `slot._replace(busy=False)` of a record that nobody
    changes."""
    way = ways.of(place)
    if way is None or not isinstance(given, ast.Call) or last_part(given.func) not in ("replace", "_replace"):
        return
    for each in given.keywords:
        if each.arg is not None:
            yield Change((*way, each.arg), Did.CLEAR if is_nothing(each.value) else Did.IN, each.value)


def _is_its_own(ways: Ways, name: str, value: ast.expr) -> bool:
    """`offset += size` of `offset = HEADER.size`, a number of the function's own; not where `left -= n` is
    written back, nor where `free += [page]` adds to the list that it is a name of."""
    if name in ways.of_module or isinstance(value, CONTAINERS):
        return False
    return not any(
        isinstance(given, ast.Name) and given.id == name
        for node in ways.function.statements
        for written, given in assigned_by(node)
        if not isinstance(written, ast.Name) or written.id in ways.of_module
    )


def _lasting(ways: Ways, target: ast.expr) -> Target | None:
    """What outlives the function: no local name, but `left` after `global left`."""
    if isinstance(target, ast.Name):
        return target if target.id in ways.of_module else None
    return target if isinstance(target, ast.Attribute | ast.Subscript) else None


def _at(ways: Ways, target: ast.expr, did: Did, value: ast.expr | None) -> Iterator[Change]:
    if (way := ways.of(target)) is not None:
        yield Change(way, did, value)


def _in(ways: Ways, place: ast.expr, did: Did, value: ast.expr) -> Iterator[Change]:
    """Of what is called to be changed."""
    match place:
        case ast.Attribute():
            within: bool | None = False
        case ast.Subscript() | ast.Call():
            within = True
        case _:
            within = None
    yield from (replace(change, within=within) for change in _at(ways, place, did, value))


def _given(ways: Ways, target: Target, value: ast.expr) -> tuple[Did, ast.expr]:
    """`count[key] = count.get(key, 0) + 1` counts up, `busy[n] = None` and `page.busy = False` unmark,
    `free = free[n:]` takes out."""
    value = ways.sums.get(value.id, value) if isinstance(value, ast.Name) else value
    match value:
        case ast.Call(func=ast.Name(id="min" | "max"), args=args):
            sums = [each for each in args if isinstance(each, ast.BinOp)]
            return _given(ways, target, sums[0]) if sums else (Did.SET, value)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=more) if _shows(ways, left, target):
            if isinstance(more, ast.List | ast.Tuple):
                return Did.IN, more
            if isinstance(more, ast.Set):
                return (Did.IN if isinstance(op, ast.Add) else Did.OUT), more
            return (Did.MORE if isinstance(op, ast.Add) else Did.LESS), more
        case ast.BinOp(left=left, op=ast.BitOr(), right=more) if _shows(ways, left, target):
            return Did.IN, more
        case ast.BinOp(left=left, op=ast.BitAnd(), right=ast.UnaryOp(op=ast.Invert(), operand=less)) if (
            _shows(ways, left, target)
        ):
            return Did.OUT, less
        case ast.Subscript(value=whole, slice=ast.Slice()) if _shows(ways, whole, target):
            return Did.OUT, value
        case ast.Attribute(value=first) | ast.Subscript(slice=first) if (
            not isinstance(target, ast.Subscript) and (way := ways.of(target)) and ways.of(first) == way
        ):
            return Did.OUT, first  # `at = self.head; self.head = self.next[at]`
        case ast.Constant(value=None | False | 0):
            return Did.CLEAR, value
        case ast.Constant(value=str()) | ast.Attribute() if state_of(value) is False:
            return Did.CLEAR, value
        case _ if isinstance(target, ast.Subscript) and _is_emptied(ways, target, value):
            return Did.CLEAR, value
        case ast.Tuple(elts=ends) | ast.Call(args=ends) if _is_what_is_left(ways, target, ends):
            return Did.OUT, value
        case _ if (gone := left_out(value, target)) is not None:
            return Did.OUT, gone
        case _ if joins(value, target):
            return Did.IN, value
        case _ if isinstance(target, ast.Subscript) or isinstance(value, ast.Constant):
            return Did.IN, value
    if (used := state_of(value)) is not None:
        return (Did.IN if used else Did.CLEAR), value
    return Did.SET, value


def _is_emptied(ways: Ways, target: ast.Subscript, value: ast.expr) -> bool:
    """`self.state[at] = State.IDLE`, as it was made; `self.rows[at] = (0, -1)`, a record of nothing."""
    if isinstance(value, ast.Tuple) and len(value.elts) > 1:
        return all(map(is_nothing, value.elts))
    way = ways.of(target)
    return way is not None and len(way) == 2 and is_born_as(ways.function.cls, way[1], value)


def _is_what_is_left(ways: Ways, target: Target, ends: Sequence[ast.expr]) -> bool:
    """`holes[at] = (low + n, high)` of `for at, (low, high) in enumerate(holes):`: a piece is cut off."""
    moved = [
        each.left for each in ends if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add | ast.Sub)
    ]
    roots = (node.id for each in moved for node in walk(each) if isinstance(node, ast.Name))
    place = ways.of(target) if isinstance(target, ast.Subscript) else None
    return place is not None and any(ways.parts.get(root) == place for root in roots)


def _shows(ways: Ways, node: ast.expr, target: Target) -> bool:
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
            yield from _in(ways, place, Did.IN, args[-1])
        case ast.Call(func=ast.Attribute(value=place, attr=attr), args=args) if attr in _OUT_OF:
            yield from _in(ways, place, Did.OUT, args[0] if args else call)
        case ast.Call(func=ast.Attribute(value=place, attr="get"), args=[]):
            yield from _in(ways, place, Did.OUT, call)  # of a queue
        case ast.Call(func=ast.Attribute(value=place, attr=attr), args=[]) if attr in _HOLDING:
            yield from _at(ways, place, _HOLDING[attr], call)
        case ast.Call(func=ast.Attribute(value=place, attr="add_" | "sub_" as attr), args=[value]):
            yield from _at(ways, place, Did.MORE if attr == "add_" else Did.LESS, value)
        case ast.Call(func=ast.Attribute(value=place, attr=attr), args=[_, *_]) if attr in _COUNTING:
            yield from _at(ways, place, _COUNTING[attr], call)
        case ast.Call(func=ast.Attribute(value=place, attr="zero_"), args=[]):
            yield from _at(ways, place, Did.CLEAR, call)
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="add" | "subtract" as attr), attr="at"),
            args=[place, _, value],
        ):
            yield from _at(ways, place, Did.MORE if attr == "add" else Did.LESS, value)  # of numpy
        case ast.Call(func=ast.Attribute(attr="insort" | "insort_left" | "insort_right"), args=[into, thing]):
            yield from _at(ways, into, Did.IN, thing)
