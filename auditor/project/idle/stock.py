"""Stores of a class that has a fixed stock: filled when an object is made, given out and taken back since,
and never filled with anything else. What such a class takes out and drops, nobody makes again."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from auditor.project.code.bindings import assigned_by, assignments, given_to, own_attribute
from auditor.project.code.lineage import Lineage
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.idle.counted import counted
from auditor.project.idle.emptied import emptied_into
from auditor.project.idle.evicted import evicted_tables
from auditor.project.idle.objects_that_return import given_back_by_objects
from auditor.project.idle.supply import Supply, comes_back_by_itself, read_off, taken_ids
from auditor.project.shapes.field_work import FieldWork, field_work
from auditor.project.shapes.full_at_first import AROUND, INITIAL, NUMBERING, beginning, given_to_a_pool
from auditor.project.shapes.made_new import MAKERS
from auditor.project.shapes.name_bindings import FILLING, mentions
from auditor.source.nodes import walk

NO_MAKERS = NUMBERING | {"int", "str", "float", "tuple", "list", "dict", "set", "deque"}


@dataclass(frozen=True)
class Stock:
    """`fields` are its stores, `counters` fields that count what it made up to a limit, `givers`
    its methods that put in what they are told, `makers` what makes its things, unless some are `given` to it;
    `full` those of the stores that are filled at first; `replaces` tells that it puts something new in the
    place of what it will not use again; `marks` are fields with the way in which a place is marked that is
    lent; `makes_more` tells that it makes new things without end where a store is empty, `alone` that it made
    all of them for these stores, so that nobody else knows one that is in none of them, `ends` that nothing
    is known of them but that the class ends what it does not keep."""

    cls: Class
    fields: frozenset[str]
    works: tuple[FieldWork, ...]
    counters: frozenset[str] = frozenset()
    givers: frozenset[str] = frozenset()
    makers: frozenset[str] = frozenset()
    given: bool = False
    replaces: bool = False
    full: frozenset[str] = frozenset()
    marks: frozenset[tuple[str, bool]] = frozenset()
    makes_more: bool = False
    alone: bool = False
    ends: bool = False

    @cached_property
    def idle_marks(self) -> frozenset[str]:
        """Fields that say what a thing was when it came back, and not whether it is lent:
        `self.dirty[slot] = True`."""
        return frozenset(
            mark.field
            for work in self.works
            if any(put.field in self.full and work.is_from_told(put.thing) for put in work.put)
            for mark in work.marked
            if mark.on
        )

    @cached_property
    def memory(self) -> frozenset[str]:
        """Fields with what lies at its places: `self.k = torch.zeros(pages, page_size, width)`. An array of
        one dimension may be books."""
        return frozenset(
            at.attr
            for method in self.cls.methods.values()
            for at, value in assignments(method)
            if isinstance(at, ast.Attribute) and _has_dimensions(value)
        )


def _has_dimensions(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=func, args=[ast.Tuple(elts=[_, _, *_])] | [_, _, *_]):
            return last_part(func) in MAKERS
    return False


def stock_of(lineage: Lineage, cls: Class, *, lends: bool = False) -> Stock | None:
    """The fixed stock of a class, if it has one and lends of it, as it is known to do where it `lends`."""
    begun, later = begun_and_later(lineage, cls)
    found = _fixed(cls, begun, later, known=lends)
    if found is None:
        stores, counters = counted(later)
        found = Stock(cls, stores, tuple(later), counters, full=stores) if counters else None
    return found


def begun_and_later(lineage: Lineage, cls: Class) -> tuple[list[FieldWork], list[FieldWork]]:
    """What its methods do at the beginning, and what they do after that."""
    methods = _methods([*reversed(lineage.lineage(cls))])
    works = [field_work(method) for method in methods]
    begun = beginning(works)
    return begun, _later(works, begun)


def _fixed(
    cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork], *, known: bool
) -> Stock | None:
    filled = _filled(cls, begun, later)
    worked = {name for work in later for name, _ in work.taken} | {
        put.field for work in later for put in work.put
    }
    full = {name for name in worked if name in filled or given_to_a_pool(begun, cls, name, known=known)}
    full = {name for name in full if not _is_only_looked_into(name, later)}
    evicting = evicted_tables(later, frozenset(full))
    fields = _circulating(frozenset(full) | evicting, later)
    lends = any(taken_ids(work, fields) and work.hands_out(read_off(work, fields)) for work in later) or any(
        puts_back(work, frozenset(), read_off(work, frozenset(full)), fields - full) for work in later
    )
    givers = {
        work.method.name
        for work in later
        if any(put.field in fields and _is_told(work, put.thing) for put in work.put)
    }
    stored = [value for name in sorted(fields) for value in filled.get(name, ())]
    made_by = {last_part(call.func) for call in _calls_of(stored)}
    makers = made_by - NO_MAKERS
    if not (
        fields and lends and (givers or evicting or fields & given_back_by_objects(cls).keys())
    ) or comes_back_by_itself(cls, makers):
        return None
    lending = {work.method.name for work in later if work.hands_out(taken_ids(work, fields))}
    numbered = bool(made_by & NUMBERING) and not makers and full <= filled.keys()
    supplies = [Supply(work, fields, makers, lending, numbered=numbered) for work in later]
    if any(supply.grows() for supply in supplies):
        return None
    given = not full <= filled.keys() or any(supply.joins for supply in supplies)
    return Stock(
        cls,
        fields,
        tuple(later),
        givers=frozenset(givers),
        makers=frozenset(makers),
        given=given,
        replaces=any(supply.makes for supply in supplies),
        full=fields & full,
        alone=bool(makers) and not given and _are_nowhere_else(fields & full, filled),
    )


def _is_told(work: FieldWork, thing: ast.expr) -> bool:
    """Or found among others by what it is told: `if self.tensors[i] is tensor: self.free.append(i)`."""
    return work.is_from_told(thing) or mentions(thing, work.met_by_told, frozenset())


def _are_nowhere_else(full: frozenset[str], filled: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Each is made where it is put in, and not known by a name or in another field."""
    others = {id(value) for name, values in filled.items() if name not in full for value in values}
    stored = [value for name in full for value in filled[name]]
    return all(isinstance(value, ast.Call) and id(value) not in others for value in stored)


def _is_only_looked_into(name: str, works: Iterable[FieldWork]) -> bool:
    """Of `self.slabs[slot][:size]` the slab stays where it is."""
    taken = [node for work in works for each, node in work.taken if each == name]
    return bool(taken) and all(
        isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript) for node in taken
    )


def _later(works: Sequence[FieldWork], begun: Sequence[FieldWork]) -> list[FieldWork]:
    """What runs after the beginning, too: a helper of `__init__` may be others' helper as well."""
    others = [work for work in works if work not in begun]
    asked = {last_part(call.func) for work in others for call in work.method.calls}
    helpers = {work.method.name for work in begun if work.method.name.startswith("_")}
    return [work for work in works if work.method.name not in INITIAL | (helpers - asked)]


def _methods(family: Sequence[Class]) -> list[Function]:
    """The class's own and those that it inherits; of constructors all, for one calls the other."""
    found = {
        (name, cls.name if name in INITIAL else ""): method
        for cls in family
        for name, method in sorted(cls.methods.items())
    }
    return [method for (name, _), method in sorted(found.items()) if not name.endswith("=")]


def _calls_of(values: Sequence[ast.expr]) -> Iterator[ast.Call]:
    """Of each thing that is put in, and of the parts of a tuple."""
    for value in values:
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        yield from (part for part in parts if isinstance(part, ast.Call))


def filled_by_others(stock: Stock, texts: Iterable[str]) -> bool:
    """`pool.idle.append(Worker())`, `pool.give_back(Worker())` in whoever uses it; and another file that
    makes such things and gives some back may bring new ones."""
    module, gives = stock.cls.module.text, rf"\.{_any(stock.givers)}\("
    for own in {each.text for each in (stock.cls, *given_back_by_objects(stock.cls).values())}:
        module = module.replace(own, "")
    makes = rf"(?<!class )\b{_any(name for name in stock.makers if name[:1].isupper())}\("
    puts = rf"(?<!self)(?<!cls)\.{_any(stock.fields)}\.{_any(FILLING)}\(|{gives}(?:\w+\.)*{makes}"
    return re.search(puts, module) is not None or any(
        re.search(makes, text) is not None and re.search(gives, text) is not None
        for text in texts
        if text != stock.cls.module.text
    )


def _any(names: Iterable[str]) -> str:
    """One of these; nothing where there are none."""
    return f"(?:{'|'.join(names) or '(?!)'})"


# Filled at first --------------------------------------------------------------------------------------------


def _filled(cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork]) -> dict[str, list[ast.expr]]:
    """Fields that are full from the start, with what is put there; a number stands for itself."""
    found: dict[str, list[ast.expr]] = {}
    for work in begun:
        for node in work.method.statements:
            for name, value in _put_at_birth(work, node, later):
                found.setdefault(name, []).append(value)
    for statement in cls.node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(keywords=keywords)):
                for made in (k.value.body for k in keywords if isinstance(k.value, ast.Lambda)):
                    found.setdefault(name, []).extend(_elements(made))
    return {name: values for name, values in found.items() if values}


def _put_at_birth(
    work: FieldWork, node: ast.stmt, later: Sequence[FieldWork]
) -> Iterator[tuple[str, ast.expr]]:
    own = work.method.owner or ""
    for target, value in assigned_by(node):
        if (name := own_attribute(target, own)) is not None:
            given = _yielded(work.method, _spelled_out(work.method, value))
            yield from ((name, each) for each in _elements(given))
    match node:
        case ast.For(body=body) | ast.While(body=body):
            calls = [each for part in body for each in walk(part) if isinstance(each, ast.Call)]
            inside = {id(each) for part in body for each in walk(part)}
            for put in work.put:
                if id(put.value) in inside and not _is_empty(put.value):
                    yield put.field, _number_of(node, put.value)
            for call in calls:
                yield from _by_own_method(call, own, later)


def _number_of(loop: ast.For | ast.While, value: ast.expr) -> ast.expr:
    """`range(n)` for the `i` of `for i in range(n): self.idle.put(i)`."""
    match loop, value:
        case ast.For(target=ast.Name(id=turn), iter=ast.Call(func=func) as numbers), ast.Name(id=name):
            return numbers if turn == name and last_part(func) in NUMBERING else value
    return value


def _by_own_method(call: ast.Call, own: str, later: Sequence[FieldWork]) -> Iterator[tuple[str, ast.expr]]:
    """`self.push(Segment(i))`, where `push` puts what it is told."""
    name = own_attribute(call.func, own)
    for work in later if name is not None and call.args else ():
        if work.method.name == name:
            yield from ((put.field, call.args[0]) for put in work.put if work.is_from_told(put.thing))


def _spelled_out(method: Function, value: ast.expr) -> ast.expr:
    """`deque(buffers)` of a local list, `deque(self.all)` of another field: that list."""
    match value:
        case ast.Call(func=func, args=[inner]) if last_part(func) in AROUND:
            return _spelled_out(method, inner) if isinstance(inner, ast.Name | ast.Attribute) else value
        case ast.Name(id=name):
            return next(given_to(method, name), value)
        case ast.Attribute():
            text = ast.unparse(value)
            fields = ((at, given) for at, given in assignments(method) if isinstance(at, ast.Attribute))
            return next((given for at, given in fields if ast.unparse(at) == text), value)
    return value


def _yielded(method: Function, value: ast.expr) -> ast.expr:
    """`[MemoryRegion(base, size)]` for `sorted(self._register(sizes))`, of a generator that yields such."""
    match value:
        case ast.Call(func=func, args=[ast.Call() as asked, *_]) if last_part(func) in AROUND:
            pass
        case _:
            return value
    maker = (
        method.cls.methods.get(own_attribute(asked.func, method.owner or "") or "") if method.cls else None
    )
    made = [node.value for node in maker.of_kind(ast.Yield) if node.value is not None] if maker else []
    return ast.List(made) if made else value


def _elements(value: ast.expr) -> Iterator[ast.expr]:
    """What a container holds that is made by this expression."""
    match value:
        case ast.Call(func=func) if last_part(func) in NUMBERING:
            yield value
        case ast.Call(func=ast.Attribute(attr="fromkeys"), args=[inner, *_]):
            yield from _elements(inner)
        case ast.Call(func=func, args=[inner, *_]) if last_part(func) in AROUND:
            yield from _elements(inner)
        case (
            ast.Subscript(value=inner)
            | ast.BinOp(left=inner)
            | ast.Call(func=ast.Attribute(value=inner), args=[])
        ):
            yield from _elements(inner)  # `list(range(n))[::-1]`, `arange(n).tolist()`
        case ast.ListComp(elt=inner) | ast.SetComp(elt=inner) | ast.GeneratorExp(elt=inner):
            yield inner
        case ast.DictComp(key=inner, value=ast.Constant(value=None)):
            yield inner
        case ast.DictComp(value=inner):
            yield from _elements(inner)
        case ast.List(elts=elements):
            yield from (each for each in elements if isinstance(each, (ast.Call, ast.Tuple)))


def _is_empty(value: ast.expr) -> bool:
    """`self.users[key] = []`, `self.flags.append(False)`: places, and nothing in them."""
    made = value.func if isinstance(value, ast.Call) and not value.args else value
    empty = isinstance(made, ast.Name) and made.id in (*AROUND, "defaultdict")
    return empty or isinstance(value, (ast.Constant, ast.List, ast.Dict, ast.Set))


# Given out and taken back -----------------------------------------------------------------------------------


def _circulating(fields: frozenset[str], works: Sequence[FieldWork]) -> frozenset[str]:
    """Also the fields from which things come back to these."""
    grown = fields
    for work in works:
        taken = {name for name, _ in work.taken} - fields
        grown |= {name for name in taken if puts_back(work, frozenset(), taken_ids(work, {name}), fields)}
        grown |= {name for put in work.put if put.field in fields for name in emptied_into(work, put.thing)}
    return grown if grown == fields else _circulating(grown, works)


def puts_back(work: FieldWork, names: Set[str], marked: Set[int], fields: Set[str]) -> bool:
    """Whether the method puts one of these, or what comes from it, into a store again."""
    derived = work.derived(names, marked)
    return any(put.field in fields and mentions(put.thing, derived, marked) for put in work.put)
