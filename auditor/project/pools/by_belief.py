"""Pairs that no name and no shape tells: one method undoes what another does to the object, and people who
ask for the one ask for the other.

That is not enough to be sure (`submit` and `cancel`, `add` and `remove`), so what is found here is only
proposed: `leases/belief` asks those who use it."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle, Position, Value
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import returns_something
from auditor.project.pools.halves import LENDING, Half, Pair, acquiring_half
from auditor.project.pools.used_together import asked_in_turn
from auditor.project.shapes.changes import MODULE, SELF, UNDONE_BY, Change, Did, Ways, all_changes
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.registers import LISTENERS
from auditor.protocols.vocabulary import Name

ENDING = re.compile(r"-= |\.pop|\bdel |\.remove\(|\.discard\(|heappop")
"""What some method of such a class does, asked of its text before its methods are read."""

ACQUIRING = Name("acquire", frozenset())
COUNTING = Name("incr", frozenset())
RELEASING = Name("release", frozenset())


def proposed_pairs(
    model: ClassModel, cls: Class, methods: list[Function], known: Set[Function]
) -> Iterator[Pair]:
    """Of the public methods that are no half of any pair yet."""
    if ENDING.search(cls.text) is None:
        return
    asked = {m: list(_lasting(m)) for m in methods if m not in known and _may_be_half(m, known)}
    for begins, begun in asked.items() if len(asked) > 1 else ():
        ends = [each for each, ended in asked.items() if each is not begins and _undoes(begun, ended)]
        ends = [each for each in ends if _may_end(begins, each) and asked_in_turn(model, begins, each)]
        half = _half(begins, begun, ends) if ends else None
        if half is not None:
            back = (Half(each, RELEASING, half.handle, _position(half, each, asked[each])) for each in ends)
            yield Pair(f"{cls.name}.{begins.name}()", cls, (half,), tuple(back), proposed=True)


def _half(begins: Function, begun: list[Change], ends: list[Function]) -> Half | None:
    amount = next(_amounts(begins, begun), None)
    returned = {ast.unparse(v) for v in field_work(begins).returned if not isinstance(v, ast.Constant)}
    if _hands_out_what_was(begins, begun):
        return Half(begins, ACQUIRING, value=Value.INDEX, by_shape=True)
    if amount is not None:
        if returned and returned != {amount}:
            return None
        if not returned and _of_each(begins, amount, ends):
            return Half(begins, COUNTING, Handle.ARGUMENT, by_shape=True)
        handle = Handle.RESULT if returned else Handle.ARGUMENT
        return Half(begins, ACQUIRING, handle, amount, Value.AMOUNT, by_shape=True)
    if returns_something(begins):
        return acquiring_half(begins, ACQUIRING, ends, shaped=True)
    if not any(change.did in (Did.MORE, Did.LESS) for change in begun) or _stores(begins, begun):
        return None
    if not own_parameters(begins):
        return Half(begins, COUNTING, Handle.RECEIVER, by_shape=True)
    return Half(begins, ACQUIRING, Handle.ARGUMENT, by_shape=True)


def _hands_out_what_was(begins: Function, begun: list[Change]) -> bool:
    """`mark = self.top; self.top += n; return mark`, for `leave(mark)`, which sets it back."""
    own = Ways(begins)
    raised = {change.way for change in begun if change.did is Did.MORE}
    names = {value.id for value in field_work(begins).returned if isinstance(value, ast.Name)}
    return any(own.of(value) in raised for name in names for value in given_to(begins, name))


def _of_each(begins: Function, amount: str, ends: list[Function]) -> bool:
    """`spend(peer, n=1)` and `earn(peer, n=1)` of what each peer has left."""
    key = own_parameters(begins)[:1]
    return key != (amount,) and all(own_parameters(each)[:1] == key for each in ends)


def _stores(begins: Function, begun: list[Change]) -> bool:
    """`put(key, value)`, beside `delete(key)`: what is stored stays, whatever is counted by the way."""
    told = own_parameters(begins)
    values = (change.value for change in begun if change.did is Did.IN)
    return any(isinstance(value, ast.Name) and value.id in told for value in values)


def _may_end(begins: Function, ends: Function) -> bool:
    """Told what the first returned or was told; nothing where there is nothing to tell."""
    nothing = not own_parameters(begins) and not returns_something(begins)
    return bool(own_parameters(ends)) is not nothing


def _amounts(method: Function, changed: list[Change]) -> Iterator[str]:
    """Parameters by which it counts."""
    for change in changed:
        counted = change.did in (Did.MORE, Did.LESS)
        if counted and isinstance(change.value, ast.Name) and change.value.id in own_parameters(method):
            yield change.value.id


def _position(half: Half, end: Function, ended: list[Change]) -> Position:
    """Where the end is told of it: amounts are what it counts by."""
    if half.value is Value.AMOUNT:
        return next(_amounts(end, ended), 0)
    return half.argument if half.handle is Handle.ARGUMENT else 0


def _may_be_half(method: Function, known: Set[Function]) -> bool:
    """What asks a known half of its own class is that one's user."""
    private = method.name.startswith("_") or method.is_abstract or method.is_static
    return not private and LENDING.isdisjoint(method.decorators) and not _asks_one_of(method, known)


def _asks_one_of(method: Function, known: Set[Function]) -> bool:
    names = {half.name for half in known if half.cls is method.cls} if method.owner is not None else set()
    return any(own_attribute(call.func, method.owner or "") in names for call in method.calls if names)


def _lasting(method: Function) -> Iterator[Change]:
    """What it does to its object, and to what that leads to."""
    for change in all_changes(method):
        if change.way[0] in (SELF, MODULE) and len(change.way) > 1 and not LISTENERS.search(change.way[-1]):
            yield change


def _undoes(begun: list[Change], ended: list[Change]) -> bool:
    return any(
        one.way == other.way and other.did in UNDONE_BY.get(one.did, ()) for one in begun for other in ended
    )
