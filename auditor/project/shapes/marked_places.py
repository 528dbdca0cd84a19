"""Places of a field that one method finds, marks and hands out, and another, which is told one, clears."""

import ast
from collections.abc import Iterable, Iterator, Sequence, Set

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork, Put, field_work
from auditor.project.shapes.full_at_first import false_at_first, full_at_first, true_at_first
from auditor.project.shapes.markings import FREE, USED, Marking, is_nothing
from auditor.project.shapes.name_bindings import mentions
from auditor.protocols.vocabulary import ends, split
from auditor.source.nodes import walk

MEASURING = frozenset({"range", "len", "min", "max", "islice", "arange"})
"""Functions which what says how many is given to."""

HAPPENED = frozenset({"seen", "visited", "done", "sent", "dirty", "ready", "loaded", "finished", "checked",
                      "enabled", "stale", "visible"})  # fmt: skip
"""Words in the names of fields that say what has happened to a place, and not who has it."""


def says_what_happened(field: str) -> bool:
    return not HAPPENED.isdisjoint(split(field))


def marks(work: FieldWork, put: Put) -> bool:
    """`self.used[place] = request` of a place that nobody told it, and `return place`; of what is free it is
    `self.free[place] = False`."""
    if put.key is None or is_nothing(put.value) != _says_what_is_free(put):
        return False
    names = {each.id for each in walk(put.key) if isinstance(each, ast.Name)}
    found = names.isdisjoint(work.from_told) or any(_looked_for(work, put.field, name) for name in names)
    found = found or (names.isdisjoint(work.told) and _is_looked_at(work, put.field, put.key))
    handed_out = any(isinstance(value, ast.Name) and value.id in names for value in work.returned)
    return bool(names) and ((found and handed_out) or _marks_a_run(work, put, names))


def _marks_a_run(work: FieldWork, put: Put, names: Set[str]) -> bool:
    """`for place in range(first, first + n): self.used[place] = owner`, and `return first`, where it has
    looked for so many."""
    returned = {node.id for value in work.returned for node in walk(value) if isinstance(node, ast.Name)}
    nodes = _mentioned(work, put.field)
    for loop in work.method.of_kind(ast.For):
        match loop:
            case ast.For(
                target=ast.Name(id=place),
                iter=ast.Call(func=ast.Name(id="range"), args=[ast.Name(id=first), _]),
            ) if place in names and first in returned - set(work.told):
                tests = (test for node in work.method.nodes for test in _tests(node))
                return any(mentions(test, frozenset(), nodes) for test in tests)
    return False


def clears(work: FieldWork, put: Put) -> bool:
    cleared = put.key is not None and is_nothing(put.value) != _says_what_is_free(put)
    return cleared and put.key is not None and work.is_from_told(put.key)


def _says_what_is_free(put: Put) -> bool:
    return not FREE.isdisjoint(split(put.field))


# Sets, bits and flags ---------------------------------------------------------------------------------------


def marked_fields(works: Sequence[FieldWork]) -> Iterator[tuple[str, bool]]:
    """Each with the way in which somebody marks it."""
    yield from sorted({(each.field, each.on) for work in works for each in work.marked})


def searches_and_marks(work: FieldWork, field: str, on: bool) -> bool:
    """It marks a place that it found by looking into the field, and hands that out, or what lies there."""
    return any(_hands_out(work, each) for each in work.marked if each.field == field and each.on == on)


def marks_back(work: FieldWork, field: str, on: bool) -> bool:
    """Of the place that it is told, or of those; what was struck off may be put in again."""
    again = (put for put in work.put if not on and put.field == field and not _is_no(put.value))
    marked = [each.place for each in work.marked if each.field == field and each.on != on]
    met = work.met_by_told if marked else frozenset()  # which is looked for in the whole body
    return any(mentions(place, met, frozenset()) for place in marked) or any(
        work.is_from_told(each) for put in again for each in (put.key, put.value) if each
    )


def _is_no(value: ast.expr) -> bool:
    """`self.used[place] = False` strikes off; `self.free[place] = None` of an ordered set puts in."""
    return isinstance(value, ast.Constant) and value.value is False


def finds_a_place(function: Function, partners: Sequence[Function]) -> bool:
    """It looks for a place, marks it and hands it out, and one of the others clears what it is told."""
    work = field_work(function)
    others = [field_work(partner) for partner in partners]
    return any(
        searches_and_marks(work, field, on) and any(marks_back(other, field, on) for other in others)
        for field, on in marked_fields([work])
    )


def keeps_count(taker: FieldWork, giver: FieldWork, field: str, on: bool, begun: Sequence[FieldWork]) -> bool:
    """Whether the field says what is in use: a number's bits do, and a table of who has what; a set is called
    so, or is full at first if what is taken leaves it, or all off if that is marked there; else the methods
    are called like halves of a pair."""
    marked = [each for each in taker.marked if each.field == field]
    if any(each.bit or (each.on and each.value is not None) for each in marked):
        return True
    called = (USED if on else FREE).isdisjoint(split(field))
    free = not on and (full_at_first(begun, taker.method, field) or true_at_first(begun, field))
    free = free or (on and false_at_first(begun, field) and not says_what_happened(field))
    return not called or free or ends(giver.method.name, taker.method.name)


def _hands_out(work: FieldWork, mark: Marking) -> bool:
    own = work.method.owner
    if own is not None and own_attribute(mark.place, own) is not None:
        return _is_tested(work, mark) and _same(mark.place, work.returned)
    names = {*_names(mark.place)} - {own}
    names = names or {*work.derived(frozenset(), _mentioned(work, mark.field))} - work.told
    told = work.derived(_told_itself(work), frozenset())
    searched = _searched(work, mark.field, names)
    if not names or not names.isdisjoint(told) or not (mark.bit or searched):
        return False
    kin = names if mark.value is not None else work.of_one_kind(names)
    known = work.derived(kin - work.told, frozenset())
    shown = _mentioned(work, mark.field) if mark.value is not None else set()
    kept = {*_names(mark.value)} & known if mark.value is not None else set()
    return any(
        mentions(value, known, frozenset()) and not mentions(value, kept, shown) for value in work.returned
    )


def _is_tested(work: FieldWork, mark: Marking) -> bool:
    """`if self.last not in self.in_flight:`"""
    nodes = _mentioned(work, mark.field)
    tests = (test for node in work.method.nodes for test in _tests(node))
    return any(mentions(test, frozenset(), nodes) and _same(mark.place, walk(test)) for test in tests)


def _same(place: ast.expr, nodes: Iterable[ast.AST]) -> bool:
    return any(ast.unparse(place) == ast.unparse(node) for node in nodes)


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in walk(node) if isinstance(each, ast.Name))


def _told_itself(work: FieldWork) -> Set[str]:
    """Without what only says how many."""
    measures = {id(name) for node in work.method.nodes for given in _measured(node) for name in walk(given)}
    return {
        node.id
        for node in work.method.nodes
        if isinstance(node, ast.Name) and node.id in work.told and id(node) not in measures
    }


def _measured(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in MEASURING:
            yield from args
        case ast.Compare(left=left, comparators=comparators, ops=ops):
            if not any(isinstance(op, ast.In | ast.NotIn) for op in ops):
                yield from (left, *comparators)
        case ast.Slice() | ast.BinOp() | ast.JoinedStr():
            yield node


def _mentioned(work: FieldWork, field: str) -> set[int]:
    return {id(node) for node in work.method.nodes if isinstance(node, ast.Attribute) and node.attr == field}


def _searched(work: FieldWork, field: str, names: Set[str]) -> bool:
    """`if place not in self.taken`, `place = min(self.free)`, `place = self._first_free()`."""
    nodes = _mentioned(work, field)
    if not names.isdisjoint(work.derived(frozenset(), nodes | _looking(work, field))):
        return True
    return any(
        mentions(test, frozenset(), nodes) and mentions(test, names, frozenset())
        for node in work.method.nodes
        for test in _tests(node)
    )


def _looking(work: FieldWork, field: str) -> set[int]:
    """Calls of the object's other methods that look into the field."""
    cls, own = work.method.cls, work.method.owner
    return {
        id(call)
        for call in work.method.calls
        if cls is not None
        and own is not None
        and (helper := cls.methods.get(own_attribute(call.func, own) or "")) is not None
        and f".{field}" in helper.text
    }


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test
        case ast.comprehension(ifs=ifs):
            yield from ifs


def _is_looked_at(work: FieldWork, field: str, place: ast.expr) -> bool:
    """`if not self.used[area.window()].any():`, of an area as large as it is told."""
    nodes = _mentioned(work, field)
    tests = (test for node in work.method.nodes for test in _tests(node))
    return any(
        isinstance(each, ast.Subscript)
        and mentions(each.value, frozenset(), nodes)
        and ast.unparse(each.slice) == ast.unparse(place)
        for test in tests
        for each in walk(test)
    )


def _looked_for(work: FieldWork, field: str, name: str) -> bool:
    """`places = torch.nonzero(self.free)[:n]`: told how many, it finds them in the field."""
    return name not in work.told and any(
        isinstance(inner, ast.Attribute) and inner.attr == field
        for value in given_to(work.method, name)
        for inner in walk(value)
    )
