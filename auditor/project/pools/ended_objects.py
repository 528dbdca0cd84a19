"""Objects that undo by a method of their own what their maker did, whatever the two are called.

`begin(key)` adds to `self.server.locked` and returns `Lease(self.server, key)`; `lease.end()` discards from
there. Or the object lies in a stock of its maker and puts itself back: `self.home.free_pages.add(self)`.
Or it does both: `Reservation(budget, amount)` lowers `budget.left`, `cancel()` raises it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from auditor.flow.effects import Handle
from auditor.project.code.bindings import assignments, given_to, own_attribute, ways
from auditor.project.code.class_model import ClassModel
from auditor.project.code.entered import EXITS
from auditor.project.code.kept_as_told import fields_of
from auditor.project.code.modules import Class, Function, Module
from auditor.project.pools.bodies import returns_something
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lent_objects import (
    comes_back_when_dropped,
    goes_straight_on,
    needs_nothing,
    stored_class,
)
from auditor.project.shapes.changes import UNDONE_BY, Change, Did, all_changes, changes
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.full_at_first import beginning, full_at_first, things_to_do
from auditor.project.shapes.registers import LISTENERS, is_limited
from auditor.project.shapes.ways import DEEPEST, MODULE, SELF, Way, Ways
from auditor.protocols.vocabulary import Name, split, undoes
from auditor.source.nodes import walk

NO_END = frozenset(
    {"undo", "redo", "revert", "requeue", "retry", "nack", "reject", "resubmit", "delete", "remove",
     "destroy", "unlink", "next", "advance", "rewind", "seek", "reset", "clear", "pop", "flush"}
)  # fmt: skip
"""First words of methods that take back what somebody meant to last, or go on with it."""


@dataclass(frozen=True, slots=True)
class Maker:
    """`function` returns what `call` makes; `leads` are ways by which its fields are reached in the maker."""

    function: Function
    made: Class
    calls: Set[int]
    names: Set[str]
    leads: Mapping[str, Way]
    kept: Mapping[str, ast.expr]


def ended_objects(model: ClassModel, module: Module, paired: Set[Function]) -> Iterator[Pair]:
    """Pairs of who makes such an object, and the object's methods that end it."""
    classes = [cls for _, cls in sorted(module.classes.items())]
    methods = [method for cls in classes for _, method in sorted(cls.methods.items())]
    plain = [f for _, f in sorted(module.functions.items()) if f.cls is None and f.parent is None]
    for function in (*methods, *plain):
        if function in paired or function.name.startswith("__") or LENDING & set(function.decorators):
            continue
        maker = _maker(model, function)
        ends = list(_ends(model, maker) if maker is not None else _ends_of_stored(model, function))
        if ends:
            yield _pair(function, ends)
    for cls in classes:
        init = cls.methods.get("__init__")
        if init is not None and init not in paired and (ends := list(_ends_of_made(model, cls, init))):
            yield _pair(init, ends)


def _pair(taker: Function, ends: Iterable[Function]) -> Pair:
    pool = taker.cls.name if taker.cls else taker.module.path.rpartition("/")[2].removesuffix(".py")
    half = Half(taker, Name("acquire", frozenset()), by_shape=True)
    back = (Half(end, Name("release", frozenset()), Handle.RECEIVER) for end in ends)
    return Pair(pool, taker.cls, (half,), tuple(back))


# Who makes what ---------------------------------------------------------------------------------------------


def _maker(model: ClassModel, function: Function) -> Maker | None:
    """What it returns is made by itself, and goes by one class."""
    returned = [
        way
        for node in function.statements
        if isinstance(node, ast.Return) and node.value is not None
        for way in ways(node.value)
    ]
    names = {each.id for each in returned if isinstance(each, ast.Name)}
    given = [way for name in sorted(names) for value in given_to(function, name) for way in ways(value)]
    calls = [each for each in (*returned, *given) if isinstance(each, ast.Call)]
    by_itself = [(function, call, call) for call in calls]
    by_helpers = [(helper, call, made) for call in calls for helper, made in _made_by_helper(function, call)]
    made = [
        (where, outer, call, model.callee(where, call.func))
        for where, outer, call in (*by_itself, *by_helpers)
        if _names_a_class(call.func)
    ]
    for where, _, call, cls in made:
        if isinstance(cls, Class) and not _ends_when_dropped(cls):
            own = Ways(where)
            kept = _kept(model, cls, call)
            leads = {field: way for field, value in kept.items() if (way := own.of(value)) is not None}
            if where is not function:  # what that is told has other names here
                leads = {field: way for field, way in leads.items() if way[0] in (SELF, MODULE)}
            return Maker(function, cls, {id(each) for _, each, _, _ in made}, names, leads, kept)
    return None


def _made_by_helper(function: Function, call: ast.Call) -> Iterator[tuple[Function, ast.Call]]:
    """`return Window(i, self.view[i], self)` of `self._window(i)`: of the maker's own object it has the same
    fields as the maker."""
    name = own_attribute(call.func, function.owner or "") if function.cls is not None else None
    helper = function.cls.methods.get(name) if function.cls is not None and name is not None else None
    body = helper.node.body if helper is not None and helper.owner == function.owner else None
    match body:
        case [*_, ast.Return(value=ast.Call() as made)] if helper is not None:
            yield helper, made


def _names_a_class(func: ast.expr) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name == "cls" or name.lstrip("_")[:1].isupper()


def _ends_when_dropped(cls: Class) -> bool:
    return "__del__" in cls.methods or any(map(comes_back_when_dropped, cls.methods.values()))


def _kept(model: ClassModel, cls: Class, call: ast.Call) -> dict[str, ast.expr]:
    """The fields of the object under which it keeps what it is told here."""
    init = model.method(cls, "__init__")
    told = init.parameters[1:] if init is not None else tuple(fields_of(model, cls))
    given = dict(zip(told, call.args, strict=False))
    given.update({each.arg: each.value for each in call.keywords if each.arg is not None})
    if init is None:
        return given
    fields = _fields_of_parameters(init)
    return {field: given[name] for field, name in fields.items() if name in given}


def _fields_of_parameters(init: Function) -> dict[str, str]:
    """`self.server = server`"""
    return {
        field: value.id
        for target, value in assignments(init)
        if isinstance(value, ast.Name) and value.id in init.parameters
        if (field := own_attribute(target, init.owner or "")) is not None
    }


# Who ends it ------------------------------------------------------------------------------------------------


def _ends(model: ClassModel, maker: Maker) -> list[Function]:
    begun = [change for change in all_changes(maker.function) if not _speaks_of_work(maker.function, change)]
    recorded = {change.way for change in begun if change.did is Did.IN and _is_made(maker, change.value)}
    limited = bool(recorded) and all(
        len(way) == 2 and is_limited(maker.function, way[-1]) for way in recorded
    )
    found = []
    for end in _methods(model, maker.made) if begun else ():
        named = undoes(end.name, maker.function.name)
        if recorded and not (named or limited):
            continue
        if (may_end(end, named) or _may_end_told(end)) and _ends_it(model, maker, end, begun):
            found.append(end)
    return found if any(may_end(end, undoes(end.name, maker.function.name)) for end in found) else []


def _ends_it(model: ClassModel, maker: Maker, end: Function, begun: list[Change]) -> bool:
    if _tells_its_maker(model, maker, end, begun):
        return True
    ended = [(done, way) for done in all_changes(end) if (way := _translated(done, maker.leads))]
    return any(
        _undoes(change, done, way) and (done.did is not Did.SET or _restores(maker, change, done))
        for change in begun
        for done, way in ended
    )


def _tells_its_maker(model: ClassModel, maker: Maker, end: Function, begun: list[Change]) -> bool:
    """`self.quota._voided(self.amount)`, of the maker's own object, which undoes there what it has done."""
    pool = maker.function.cls
    own = {field for field, way in maker.leads.items() if way == (SELF,)}
    if pool is None:
        return False
    ended = [
        (done, done.way)
        for told in _told_of_it(model, maker.made, pool, end, own)
        for done in all_changes(told)
    ]
    ended += _done_to_what_it_has(model, maker, pool, end, own)
    return any(
        _undoes(change, done, way) and done.did is not Did.SET for done, way in ended for change in begun
    )


def _done_to_what_it_has(
    model: ClassModel, maker: Maker, pool: Class, end: Function, own: Set[str]
) -> Iterator[tuple[Change, Way]]:
    """`self.cache._unref(self.item)`, of the entry that the maker has counted up, by its way there."""
    for call in end.calls:
        asked = call.func if isinstance(call.func, ast.Attribute) else None
        if asked is None or own_attribute(asked.value, end.owner or "") not in own:
            continue
        told = model.method(pool, asked.attr)
        for parameter, argument in zip(told.parameters[1:], call.args, strict=False) if told else ():
            given = given_to(end, argument.id) if isinstance(argument, ast.Name) else iter([argument])
            leads = [maker.leads.get(own_attribute(each, end.owner or "") or "") for each in given]
            for done in all_changes(told) if told else ():
                if done.way[0] == parameter:
                    yield from ((done, (*way, *done.way[1:])) for way in leads if way is not None)


def _told_of_it(
    model: ClassModel, made: Class, pool: Class, end: Function, fields: Set[str], deep: int = 0
) -> Iterator[Function]:
    """Private methods of the pool that a method of its object calls through one of these fields, also where
    it has another method of its own do that."""
    for call in end.calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr=helper) if name == end.owner and deep < DEEPEST:
                asked = model.method(made, helper)
                if asked is not None and asked is not end:
                    yield from _told_of_it(model, made, pool, asked, fields, deep + 1)
            case ast.Attribute(value=field, attr=name) if name.startswith("_"):
                told = model.method(pool, name) if own_attribute(field, end.owner or "") in fields else None
                if told is not None:
                    yield told


def _ends_of_stored(model: ClassModel, taker: Function) -> Iterator[Function]:
    """`self._home.free_pages.add(self)`, of what is taken out of `free_pages`, which is full at first."""
    pool = taker.cls
    taken = {name for name, _ in field_work(taker).taken} if pool is not None else set()
    if pool is None or not taken or not returns_something(taker):
        return
    begun = beginning([field_work(method) for _, method in sorted(pool.methods.items())])
    stocks = {name for name in taken if full_at_first(begun, taker, name) and not things_to_do(pool, name)}
    stored = stored_class(model, pool, taker) if stocks else None
    for end in _methods(model, stored) if stored is not None and stored is not pool else ():
        put = (done for done in all_changes(end) if done.did is Did.IN and done.way[-1] in stocks)
        if may_end(end, named=False) and any(
            len(done.way) == 3 and isinstance(done.value, ast.Name) and done.value.id == end.owner
            for done in put
        ):
            yield end


def _ends_of_made(model: ClassModel, cls: Class, init: Function) -> Iterator[Function]:
    """What it does to others when it is made, and undoes; not to tell them that it is there."""
    leads: dict[str, Way] = {field: (name,) for field, name in _fields_of_parameters(init).items()}
    begun = [change for change in changes(init) if change.way[0] != SELF]
    told = any(_mentions(change.value, init.owner or "") for change in begun if change.value is not None)
    if not begun or told or _ends_when_dropped(cls):
        return
    for end in _methods(model, cls):
        ended = [(done, way) for done in all_changes(end) if (way := _translated(done, leads))]
        if may_end(end, named=False) and any(
            _undoes(change, done, way) and done.did is not Did.SET for change in begun for done, way in ended
        ):
            yield end


def _methods(model: ClassModel, cls: Class) -> Iterator[Function]:
    seen: set[str] = set()
    for each in model.lineage(cls):
        for name, method in sorted(each.methods.items()):
            if name not in seen and (name in EXITS or not name.startswith("__")):
                seen.add(name)
                yield method


def may_end(end: Function, named: bool) -> bool:
    """Told nothing, unless its name says what it ends; no property, and no promise."""
    if end.is_abstract or LENDING & set(end.decorators) or end.is_static:
        return False
    told_nothing = needs_nothing(end) or end.name in EXITS
    return named or (told_nothing and NO_END.isdisjoint(split(end.name)[:1]))


def _may_end_told(end: Function) -> bool:
    """`commit(used)` beside `cancel()`"""
    own = end.name.startswith("_") or end.is_abstract or end.is_static or bool(LENDING & set(end.decorators))
    return not own and goes_straight_on(end) and NO_END.isdisjoint(split(end.name)[:1])


def _translated(change: Change, leads: Mapping[str, Way]) -> Way | None:
    """The maker's way to what a method of the object changes through one of its fields."""
    if change.way[0] == MODULE:
        return change.way
    if change.way[0] != SELF or len(change.way) < 2 or change.way[1] not in leads:
        return None
    rest = change.way[2:]
    return (*leads[change.way[1]], *rest) if rest or _is_kept_by_reference(change) else None


def _is_kept_by_reference(change: Change) -> bool:
    """`self.table.discard(n)` changes the table; `self.count -= 1` and `self.page = None` only itself."""
    return change.did in (Did.IN, Did.OUT) and not isinstance(change.value, ast.Constant)


def _undoes(begun: Change, done: Change, way: Way) -> bool:
    return way == begun.way and done.did in UNDONE_BY.get(begun.did, ())


def _restores(maker: Maker, change: Change, done: Change) -> bool:
    """`self.arena.top = self.start`, of what was the arena's top before."""
    field = done.value.attr if isinstance(done.value, ast.Attribute) else ""
    value = maker.kept.get(field)
    own = Ways(maker.function)
    before = given_to(maker.function, value.id) if isinstance(value, ast.Name) else iter(())
    return any(own.of(each) == change.way for each in (*before, *([value] if value is not None else [])))


def _speaks_of_work(function: Function, change: Change) -> bool:
    """Jobs that are taken are done, and listeners stay."""
    field = change.way[-1]
    taken = change.did is Did.OUT and things_to_do(function.cls, field)
    told = change.value.id if isinstance(change.value, ast.Name) else ""
    return taken or LISTENERS.search(f"{function.name}_{told}_{field}") is not None


def _is_made(maker: Maker, value: ast.expr | None) -> bool:
    return id(value) in maker.calls or (isinstance(value, ast.Name) and value.id in maker.names)


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in walk(node))
