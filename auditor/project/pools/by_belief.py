"""Pairs that no name and no shape tells: one method undoes what another does to the object, and people who
ask for the one ask for the other.

That is not enough to be sure (`submit` and `cancel`, `add` and `remove`), so what is found here is only
proposed: `leases/belief` asks those who use it."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from auditor.flow.effects import Handle, Position, Value
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.also_ended import also_ended
from auditor.project.pools.bodies import piles_up_what_it_is_told, returns_something
from auditor.project.pools.by_their_users import (
    ACQUIRING,
    RELEASING,
    called_so,
    gone_back_to,
    told_back,
)
from auditor.project.pools.counterparts import Moves, answers
from auditor.project.pools.halves import LENDING, Half, Pair, acquiring_half, is_called_a_pool
from auditor.project.pools.kept_for import kept_for
from auditor.project.pools.lasting import Lasting, undoing
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.parts_lent import part_lent
from auditor.project.pools.used_together import Told, asked_in_turn, told_alike, told_of
from auditor.project.shapes.changes import Change, Did
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.ways import MODULE, SELF, Ways
from auditor.protocols.vocabulary import RELEASE_WORDS, Name, split, take_apart

ENDING = re.compile(
    r" -=? |\.pop|\bdel |\.remove\(|\.discard\(|heappop| = (?:None|False|True|0)\b|\.release\(|&|\[[^\n]*:"
    r"|\.get(?:_nowait)?\((?:\)|timeout|block)"
    r"|\.sub_\(| = \((?:0|None|-1)\b| = -1\b| = (?:\w+\.)?[A-Z][A-Z_]+\b|\^= | [<>]=? self\.\w"
    r"|replace\(|\.(?:set|subtract|lpop|rpop|spop|decr|decrby)\(| = \"\"|\] - \{"
)
"""What some method of such a class does, asked of its text before its methods are read."""

COUNTING = Name("incr", frozenset())
SHOWING = re.compile(
    r"(?:get(?!_(?:up|off|out|rid|down|away)(?:_|$))|set(?!_(?:free|down|loose|back)(?:_|$))"
    r"|make(?!_(?:free|available|room|way)(?:_|$))|is|has|create|build|update|init|load)(?:_|$)"
)
"""Names of what shows something, or makes it, and gives nothing back; but `load(shell)` may put it back, and
`get_up(desk)`, `set_free(slot)` do."""

SHARED = re.compile(
    r"(?:get|find|load|fetch|create)_(?:or|if)_|ensure_|(?:evaluate|predict|train|forward|step|update)$"
    r"|(?:run|execute|process|handle|compute|parse|encode|decode|generate|profile|measure|ingest|manage|on"
    r"|poll|probe|peek|visit|emit|analy[sz]e|infer|translate|transform|convert|render|format)(?:_|$)"
    r"|(?:call|check)(?:_(?!(?:in|out|up)(?:_|$))|$)"
)
"""Names of what shows everybody the same, and of what works."""

EVERYDAY = frozenset({"tell", "seek", "flush", "read", "write", "append", "extend"})
"""What every file and list has begins nothing."""

REMOVING = re.compile(r"(?:remove|discard|delete|unregister|forget|invalidate)(?:_|$)")
"""Names of what takes something off a table for good: `put(place)` is no end of that."""

MANY = 6
"""More ends than this no lease has, nor does anything end more than these: each of twenty methods that push
and pop a context undoes the others."""

COUNTED = frozenset({Did.MORE, Did.LESS, Did.HELD})


def proposed_pairs(
    model: ClassModel,
    cls: Class | None,
    methods: list[Function],
    known: Set[Function],
    ends: Set[Function] = frozenset(),
    lasting: Lasting | None = None,
) -> Iterator[Pair]:
    """Of the public methods, or of a module's functions, that are no half of any pair yet. The `ends` of
    another pair may be the end of one more: `read_end(i)` counts a reader down, and frees what the last one
    has read."""
    halves = [method for method in methods if method not in known and _may_be_half(method, known)]
    if len(halves) < 2:
        return
    lasting = lasting or Lasting()
    texts = (each.text for each in (lasting.helpers.values() if cls is not None else methods))
    if not any(map(ENDING.search, texts)):
        return
    asked = {method: lasting.of(method) for method in halves}
    asked = {method: changed for method, changed in asked.items() if changed}
    moves = Moves(lasting.helpers)
    name = cls.name if cls is not None else methods[0].module.path.rpartition("/")[2].removesuffix(".py")
    undone = [
        (pair, begun)
        for begins, begun in (asked.items() if len(asked) > 1 else ())
        if begins not in ends and (is_called_a_pool(begins) or not begins.name.startswith("pop_"))
        for pair in _pairs_begun(
            model, f"{name}.{begins.name}()", cls, begins, _without(asked, begins, ends), moves
        )
    ]
    often = Counter(half.function for pair, _ in undone for half in pair.releases)
    found = [
        (_also_asked(model, pair, methods, lasting) if cls is not None else pair, begun)
        for pair, begun in undone
        if any(often[half.function] <= MANY for half in pair.releases)
    ]
    begins = {pair.acquires[0].function for pair, _ in found}
    rest = [each for each in halves if each not in begins]
    found += [(pair, []) for pair in called_so(model, name, cls, rest, list(asked))]
    begins |= {pair.acquires[0].function for pair, _ in found}
    rest = [each for each in asked if each not in begins]
    found += [(pair, []) for pair in told_back(model, name, cls, rest, list(asked))]
    found += [(pair, []) for pair in gone_back_to(model, name, cls, halves)]
    lending = [pair for pair, _ in found if pair.acquires[0].handle is Handle.RESULT]
    for pair, begun in found:
        counts = any(change.did in COUNTED for change in begun)
        wraps = pair not in lending and _asks_one_of_them(pair, lending)
        if not wraps and (counts or not _is_told_what_is_lent(pair, lending)):
            yield pair


def _asks_one_of_them(pair: Pair, lending: Sequence[Pair]) -> bool:
    """`draw_pair(size)` calls `self.draw(size)` twice: it is no half, and is followed."""
    begins = pair.acquires[0].function
    takers = {half.function.name for each in lending for half in each.acquires}
    return any(own_attribute(call.func, begins.owner or "") in takers for call in begins.calls)


def _without(
    asked: Mapping[Function, list[Change]], begins: Function, ends: Set[Function]
) -> Mapping[Function, list[Change]]:
    """Only what was counted, or is kept under a key, has an end of another pair for its own."""
    if any(change.did is Did.MORE for change in asked[begins]):
        return asked
    return {
        each: changed
        for each, changed in asked.items()
        if each not in ends or kept_for(begins, [each]) is not None
    }


def _also_asked(model: ClassModel, pair: Pair, methods: list[Function], lasting: Lasting) -> Pair:
    """With further ends of which those ask who ask for the first half."""
    begins, known = pair.acquires[0].function, len(pair.releases)
    more = also_ended(pair, methods, lasting).releases[known:]
    asked = (half for half in more if asked_in_turn(model, begins, half.function))
    return replace(pair, releases=(*pair.releases, *asked))


def _pairs_begun(
    model: ClassModel,
    name: str,
    cls: Class | None,
    begins: Function,
    asked: Mapping[Function, list[Change]],
    moves: Moves,
) -> Iterator[Pair]:
    begun = asked[begins]
    undone = [
        each
        for each, ended in asked.items()
        if each is not begins and not (begins.name in EVERYDAY or REMOVING.match(begins.name))
        if (moves.may_undo(begins, begun, each, ended) and undoing(begins, begun, each, ended))
        or answers(begins, begun, each, ended, moves)
    ]
    may_end = [each for each in undone if _may_end(begins, each)]
    ends = [each for each in may_end if asked_in_turn(model, begins, each)]
    if len(ends) > MANY:
        return
    told = {each: told_of(model, begins, each) for each in ends}
    half = _half(begins, begun, ends, [told[each] for each in ends]) if ends else None
    if half is not None:
        half = replace(half, part=part_lent(half, told.values()))
        back = (
            Half(each, RELEASING, half.handle, _position(half, each, asked[each], told[each]))
            for each in ends
        )
        alike = (replace(half, function=each) for each in asked if _lends_alike(begins, each, asked))
        others = tuple(alike) if half.handle is Handle.RESULT else ()
        yield Pair(name, cls, (half, *others), tuple(back), proposed=True)
        return
    alone = [each for each in undone if cls is not None and _ends_alone(begins, begun, each, asked[each])]
    alone = [each for each in alone if asked_in_turn(model, begins, each)]
    if alone:
        half = Half(begins, COUNTING, Handle.RECEIVER, by_shape=True)
        back = (Half(each, RELEASING, Handle.RECEIVER) for each in alone)
        yield Pair(name, cls, (half,), tuple(back), proposed=True)


def _lends_alike(begins: Function, other: Function, asked: Mapping[Function, list[Change]]) -> bool:
    """`at_least(number)` beside `current()`: it does the same, and returns the same, where it may, or both
    return what they take out."""
    did = {(change.way, change.did) for change in asked[begins]}
    lent, its = _answers(begins), _answers(other)
    alike = did == {(change.way, change.did) for change in asked[other]}
    same = bool(lent) and (lent == its or (_hands_out(begins) and _hands_out(other)))
    return other is not begins and alike and same


def _hands_out(method: Function) -> bool:
    work = field_work(method)
    return work.hands_out({id(node) for _, node in work.taken})


def _answers(method: Function) -> set[str]:
    returned = field_work(method).returned
    return {ast.unparse(value) for value in returned if not isinstance(value, ast.Constant)}


def _is_told_what_is_lent(pair: Pair, lending: Sequence[Pair]) -> bool:
    """`configure(channel)` beside `request()`, which hands the channel out that `release(channel)` takes: it
    works with what is lent."""
    half = pair.acquires[0]
    if half.handle is not Handle.ARGUMENT:
        return False
    told, ends = own_parameters(half.function)[:1], {each.function for each in pair.releases}
    return any(
        told == own_parameters(each.function)[:1]
        and told[0] not in own_parameters(other.acquires[0].function)
        for other in lending
        for each in other.releases
        if each.function in ends
    )


def _half(
    begins: Function, begun: list[Change], ends: list[Function], told: Sequence[Told | None]
) -> Half | None:
    """By its body, or else by what those who use it tell its ends."""
    handles = {each.handle for each in told if each is not None}
    if _returns_what_it_changes(begins) and not any(told_alike(begins, each) for each in ends):
        handles = {Handle.RESULT}
    if handles == {Handle.RESULT} and returns_something(begins):
        return _lending(begins, begun, ends)
    if handles == {Handle.ARGUMENT} and not _stores(begins, begun):
        return _marking(begins, begun, ends, [each.at for each in told if each is not None])
    return _by_its_body(begins, begun, ends)


def _returns_what_it_changes(begins: Function) -> bool:
    """`child.holders += 1`, `return child`, of a child that it was not told."""
    returned = {part.id for value in field_work(begins).returned for part in _names_in(value)}
    changed = {
        node.target.value.id
        for node in begins.statements
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Attribute)
        and isinstance(node.target.value, ast.Name)
    }
    return not (returned & changed).isdisjoint(returned - {begins.owner, *own_parameters(begins)})


def _names_in(value: ast.expr) -> list[ast.Name]:
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return [part for part in parts if isinstance(part, ast.Name)]


def _lending(begins: Function, begun: list[Change], ends: list[Function]) -> Half:
    """Of what it counts by, if that is what it returns."""
    returned = {ast.unparse(v) for v in field_work(begins).returned if not isinstance(v, ast.Constant)}
    if returned & {*_counted_by(begun)}:
        return Half(begins, ACQUIRING, Handle.RESULT, 0, Value.AMOUNT, by_shape=True)
    if _hands_out_what_was(begins, begun):
        return Half(begins, ACQUIRING, value=Value.INDEX, by_shape=True)
    half = acquiring_half(begins, ACQUIRING, ends, shaped=True)
    if half is not None and half.handle is Handle.RESULT:
        return replace(half, by_shape=True)
    return Half(begins, ACQUIRING, value=value_of(begins), by_shape=True)


def _marking(
    begins: Function, begun: list[Change], ends: list[Function], given: Sequence[Position]
) -> Half | None:
    """Of an amount, if it is told one; else under a key, or of each of what it is told. `unlock(key)` begins
    nothing."""
    if take_apart(begins.name, RELEASE_WORDS) is not None:
        return None
    amount = next(_amounts(begins, begun), None)
    told = own_parameters(begins)
    names = {told[at] if isinstance(at, int) and at < len(told) else str(at) for at in given}
    if amount is not None and not _of_each(begins, amount, ends) and amount in names:
        return Half(begins, ACQUIRING, Handle.ARGUMENT, amount, Value.AMOUNT, by_shape=True)
    key = next((name for name in told if name in names and name != amount), None)
    if key is None:
        return None
    return Half(begins, COUNTING, Handle.ARGUMENT, key, by_shape=True)


def _by_its_body(begins: Function, begun: list[Change], ends: list[Function]) -> Half | None:
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
    if (key := kept_for(begins, ends)) is not None:
        return Half(begins, COUNTING, Handle.ARGUMENT, key, by_shape=True)
    if returns_something(begins):
        half = acquiring_half(begins, ACQUIRING, ends, shaped=True)
        return replace(half, by_shape=True) if half is not None else None
    if not any(change.did in COUNTED for change in begun) or _stores(begins, begun):
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
    """`put(key, value)`, beside `delete(key)`: what is stored stays, whatever is counted by the way. A pool
    may refuse; who waits until the key is not there locks it."""
    told = own_parameters(begins)
    entered = {change.way[-1]: change.value for change in begun if change.did is Did.IN}
    if any(_is_waited_for(begins, field, value) for field, value in entered.items()):
        return False
    answers = {value.value for value in field_work(begins).returned if isinstance(value, ast.Constant)}
    if {True, False} <= answers:
        return False
    values = (change.value for change in begun if change.did is Did.IN)
    return any(isinstance(value, ast.Name) and value.id in told for value in values)


def _is_waited_for(begins: Function, field: str, value: ast.expr | None) -> bool:
    """`await self.bell.wait_for(lambda: key not in self.busy)`, `while key in self.busy: self.bell.wait()`"""
    if not isinstance(value, ast.Name) or "wait" not in begins.text:
        return False
    asked = rf"\b{value.id} (?:not )?in self\.{field}\b"
    return (
        re.search(rf"wait_for\(\s*lambda: {asked}|while {asked}[^\n]*:\n[^\n]*wait", begins.text) is not None
    )


def _may_end(begins: Function, ends: Function) -> bool:
    """Told what the first returned or was told; nothing where there is nothing to tell."""
    if SHOWING.match(ends.name) and not piles_up_what_it_is_told(ends):
        return False
    of_all = split(ends.name)[-1:] == ("all",) != split(begins.name)[-1:]
    if of_all and not {*own_parameters(begins)} & {*own_parameters(ends)}:
        return False  # `reject_all(error)` is told of none of those that `create_future()` made
    nothing = not own_parameters(begins) and not returns_something(begins)
    return bool(own_parameters(ends)) is not nothing


def _ends_alone(begins: Function, begun: Sequence[Change], ends: Function, ended: Sequence[Change]) -> bool:
    """`scope.open()` hands out what `scope.close()` puts back, told nothing: into what the module has
    or another object, for everybody has fields of his own."""
    taken = {change.way for change in begun if change.did is Did.OUT and _is_others(change)}
    told = own_parameters(begins) or own_parameters(ends) or SHOWING.match(ends.name)
    return not told and any(change.did is Did.IN and change.way in taken for change in ended)


def _is_others(change: Change) -> bool:
    return change.way[0] == MODULE or (change.way[0] == SELF and len(change.way) > len((SELF, "field")))


def _amounts(method: Function, changed: list[Change]) -> Iterator[str]:
    """Parameters by which it counts."""
    told = own_parameters(method)
    return (name for name in _counted_by(changed) if name in told)


def _counted_by(changed: list[Change]) -> Iterator[str]:
    """Names, of those of its own as well: `granted = min(n, self.left)`."""
    for change in changed:
        if change.did in (Did.MORE, Did.LESS) and isinstance(change.value, ast.Name):
            yield change.value.id


def _position(half: Half, end: Function, ended: list[Change], told: Told | None) -> Position:
    """Where the end is told of it: amounts are what it counts by."""
    if half.value is Value.AMOUNT:
        return next(_amounts(end, ended), 0)
    if told is not None and told.handle is half.handle:
        names = own_parameters(end)
        return names[told.end] if isinstance(told.end, int) and 0 < told.end < len(names) else told.end
    return half.argument if half.handle is Handle.ARGUMENT else 0


def _may_be_half(method: Function, known: Set[Function]) -> bool:
    """What asks a known half of its own class is that one's user."""
    private = (
        method.name.startswith("_") or method.is_abstract or method.is_static or SHARED.match(method.name)
    )
    return not private and LENDING.isdisjoint(method.decorators) and not _asks_one_of(method, known)


def _asks_one_of(method: Function, known: Set[Function]) -> bool:
    names = {half.name for half in known if half.cls is method.cls} if method.owner is not None else set()
    return any(own_attribute(call.func, method.owner or "") in names for call in method.calls if names)
