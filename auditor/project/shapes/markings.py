"""How a method marks places in a field: members of a set, bits of a number, entries of a table of flags.

`taken.add(place)` and `taken.discard(place)`, `bits |= 1 << place` and `bits &= ~(1 << place)`: whichever of
the two is done first, the other undoes it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.protocols.vocabulary import split

FREE = frozenset({"free", "freelist", "idle", "available", "avail", "unused", "spare", "vacant"})
"""Words in the names of fields that hold what nobody uses, and of states in which nobody uses it."""

USED = frozenset({"taken", "used", "use", "busy", "allocated", "leased", "borrowed", "reserved", "occupied",
                  "claimed", "lent", "live", "assigned", "ref", "refs", "refcount", "refcounts", "refcnt",
                  "flight", "inflight", "outstanding"})  # fmt: skip
"""Words in the names of fields that hold what somebody uses."""

ENTERING = frozenset({"add", "update"})
LEAVING = frozenset({"discard", "remove", "difference_update"})
BOTH = (True, False)

AT_REST = FREE | {"empty", "off", "initial", "blank"}
"""Words in the names of states in which nobody uses it."""


@dataclass(frozen=True, slots=True)
class Marking:
    """`place` of `field` is marked, or no longer. `bit` where the field is a number; `value` is what a table
    has there from now on, where it is no plain yes or no."""

    field: str
    place: ast.expr
    on: bool
    bit: bool = False
    value: ast.expr | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """The same before it is known what field the container is."""

    container: ast.expr
    place: ast.expr
    on: bool
    bit: bool = False
    value: ast.expr | None = None

    def of(self, field: str) -> Marking:
        return Marking(field, self.place, self.on, self.bit, self.value)


def marked_by(node: ast.AST) -> Iterator[Mark]:
    """What a statement or a call marks."""
    match node:
        case ast.Call(func=ast.Attribute(value=container, attr="pop"), args=[place, *_]):
            if isinstance(place, ast.Name | ast.Attribute):
                yield Mark(container, place, False)
        case ast.Call(func=ast.Attribute(value=container, attr=way), args=[place]):
            if way in ENTERING | LEAVING:
                yield Mark(container, place, way in ENTERING)
        case ast.Call(
            func=ast.Attribute(value=table, attr="index_fill_"), args=[_, place, ast.Constant(value=value)]
        ):
            yield Mark(table, place, bool(value))
        case ast.Delete(targets=[ast.Subscript(value=table, slice=place)]):
            yield Mark(table, place, False)
        case ast.AugAssign(
            target=ast.Subscript(value=table, slice=place),
            op=ast.Add() | ast.Sub() as op,
            value=ast.Constant(),
        ):
            yield Mark(table, place, isinstance(op, ast.Add))  # a count of its users
        case ast.AugAssign(target=target, op=op, value=value):
            for place, on, bit in _changes(op, value):
                yield Mark(target, place, on, bit)
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=op, right=right)) if (
            left.__class__ is target.__class__ and ast.unparse(left) == ast.unparse(target)
        ):
            for place, on, bit in _changes(op, right):
                yield Mark(target, place, on, bit)
        case ast.Assign(targets=[ast.Subscript(value=table, slice=place)], value=value):
            flag = isinstance(value, ast.Constant) and value.value is not None and value.value in BOTH
            yield Mark(table, place, not is_nothing(value), value=None if flag else value)


def is_nothing(value: ast.expr) -> bool:
    """`None`, `False`, `0`, `-1`, `State.IDLE`; `bytes(n)` and `[False] * n` of a stretch."""
    match value:
        case ast.BinOp(left=ast.List(elts=[each]), op=ast.Mult()):
            return is_nothing(each)
        case ast.BinOp(left=ast.Constant(value=bytes() as each), op=ast.Mult()):
            return not any(each)
        case ast.Call(func=ast.Name(id="bytes")):
            return True
        case ast.Attribute() | ast.Constant(value=str()) if (state := state_of(value)) is not None:
            return not state
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case ast.Constant(value=each):
            return not each
    return False


def state_of(value: ast.expr) -> bool | None:
    """Whether `State.BUSY`, `State.IDLE`, `"busy"`, `"free"` say that it is in use."""
    match value:
        case ast.Attribute(attr=name) if name.isupper():
            return AT_REST.isdisjoint(split(name))
        case ast.Constant(value=str() as name):
            return AT_REST.isdisjoint(split(name)) if name else None
    return None


def _changes(op: ast.operator, value: ast.expr) -> Iterator[tuple[ast.expr, bool, bool]]:
    """`&= ~(1 << place)` and `&= bits - 1` take a bit away, `^=` does either."""
    in_set = _is_set(value)
    match op:
        case ast.BitOr():
            yield value, True, not in_set
        case ast.BitAnd() if not in_set:
            yield value, False, True
        case ast.BitXor() if not in_set:
            yield value, True, True
            yield value, False, True
        case ast.Sub() if in_set:
            yield value, False, False


def _is_set(value: ast.expr) -> bool:
    named = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "set"
    return named or isinstance(value, ast.Set | ast.SetComp)
