"""Pools that mark their entries: `entry.in_use = True` when one is handed out, `False` when it is back."""

import ast
from collections.abc import Iterable, Iterator, Sequence, Set

from auditor.project.code.bindings import root_of
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.markings import FREE, USED, is_nothing, state_of
from auditor.protocols.vocabulary import ends, split
from auditor.source.nodes import walk

OWNERS = frozenset({"owner", "holder", "tenant", "occupant", "borrower", "lessee", "client", "user", "rid",
                    "request", "req", "job", "task"})  # fmt: skip
"""Words in the names of fields that say who has an entry."""

COUNTS = frozenset({"count", "counts", "ref", "refs", "refcount", "refcnt", "users", "uses", "pins",
                    "holders", "readers", "borrowers"})  # fmt: skip
"""Words in the names of fields that say how many have an entry."""

Flag = tuple[str, bool]
"""A field or key of an entry, and what it is set to."""


def marks_an_entry(function: Function, partners: Iterable[Function]) -> bool:
    """It goes over entries, sets a flag of one and hands that out, or a part of it; a partner sets the flag
    back."""
    set_back = {(name, not value) for partner in partners for _, (name, value) in _flags(partner)}
    entries = {entry for entry, flag in _flags(function) if flag in set_back}
    searched = {
        name.id
        for node in function.statements
        if isinstance(node, ast.For | ast.AsyncFor)
        for name in walk(node.target)
        if isinstance(name, ast.Name)
    }
    return any(
        isinstance(node, ast.Return) and node.value is not None and root_of(node.value) in entries & searched
        for node in function.statements
    )


def marks_itself(function: Function, partners: Iterable[Function]) -> bool:
    """The one thing that it has is lent, and `self.lent` says so until a partner says that it is back."""
    own = function.owner
    up = {flag for entry, flag in _flags(function) if entry == own and _says_what_is_used(*flag)}
    back = {(name, not value) for each in partners for entry, (name, value) in _flags(each) if entry == own}
    return not up.isdisjoint(back)


def entries(
    lending: Sequence[FieldWork], given: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, list[FieldWork]]]:
    """The same of methods with any names, of flags that say what is in use, and of fields that say by whom:
    one looks for an entry whose flag is down, and others set that of the entry which they are told."""
    lowered = [(work, back) for work in given if work.told and (back := _set_back(work))]
    for taker in lending if lowered else ():
        up = _set_of_own(taker)
        yield taker, [work for work, back in lowered if up and _takes_an_entry(taker, up, work, back)]


def _set_back(work: FieldWork) -> set[Flag]:
    """The opposite of what it sets of the entry that it is told."""
    flags = [*_flags(work.method), *_owners(work.method)]
    met = work.met_by_told if flags else frozenset()
    return {(flag, not value) for entry, (flag, value) in flags if entry in met}


def _set_of_own(work: FieldWork) -> dict[str, Flag]:
    """What it sets of entries that it found among those of its object."""
    flags = {**dict(_owners(work.method)), **dict(_flags(work.method))}
    own = work.method.owner
    kept = {
        id(node)
        for node in (work.method.nodes if flags else ())
        if isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == own
    }
    found = work.derived(frozenset(), kept)
    return {entry: flag for entry, flag in flags.items() if entry in found - work.from_told}


def _takes_an_entry(taker: FieldWork, up: dict[str, Flag], giver: FieldWork, back: set[Flag]) -> bool:
    named = ends(giver.method.name, taker.method.name)
    return any(
        (named or _says_what_is_used(*flag))
        and any(not {entry, *_with(taker, entry)}.isdisjoint(_roots(value)) for value in taker.returned)
        for entry, flag in up.items()
        if flag in back
    )


def _with(taker: FieldWork, entry: str) -> Iterator[str]:
    """`place` of `for place, slot in enumerate(self.slots)`, which says which slot it is."""
    for node in taker.method.statements:
        match node:
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=place), ast.Name(id=name)])) if name == entry:
                yield place


def _says_what_is_used(flag: str, value: bool) -> bool:
    return not ((USED | OWNERS) if value else FREE).isdisjoint(split(flag))


def _flags(function: Function) -> Iterator[tuple[str, Flag]]:
    """`entry.in_use = True`, `entry["in_use"] = True`, `entry.state = State.BUSY`: the entry's name and the
    flag."""
    for node in function.statements:
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=of, attr=flag)], value=ast.Constant(value=bool() as value)
            ) if (entry := _entry(of)) is not None:
                yield entry, (flag, value)
            case ast.Assign(
                targets=[ast.Subscript(value=of, slice=ast.Constant(value=str() as flag))],
                value=ast.Constant(value=bool() as value),
            ) if (entry := _entry(of)) is not None:
                yield entry, (flag, value)
            case ast.Assign(targets=[ast.Attribute(value=of, attr=flag)], value=state) if (
                entry := _entry(of)
            ) is not None and (used := state_of(state)) is not None:
                yield entry, (f"{flag}_in_use", used)
    yield from _first_and_last(function)


def _first_and_last(function: Function) -> Iterator[tuple[str, Flag]]:
    """`buffer.count = 1` of its first user, `buffer.count -= 1` of the last"""
    for node in function.statements:
        match node:
            case ast.Assign(targets=[ast.Attribute(value=of, attr=count)], value=ast.Constant(value=1)):
                first = True
            case ast.AugAssign(
                target=ast.Attribute(value=of, attr=count), op=ast.Sub(), value=ast.Constant(value=1)
            ):
                first = False
            case _:
                continue
        if (entry := _entry(of)) is not None and not COUNTS.isdisjoint(split(count)):
            yield entry, (f"{count}_in_use", first)


def _entry(node: ast.expr) -> str | None:
    """`slot` itself, or the `place` of `self.slots[place]`."""
    match node:
        case ast.Name(id=name) | ast.Subscript(value=ast.Attribute(), slice=ast.Name(id=name)):
            return name
    return None


def _owners(function: Function) -> Iterator[tuple[str, Flag]]:
    """`slot.owner = request`, `slot.owner = None`"""
    for node in function.statements:
        match node:
            case ast.Assign(targets=[ast.Attribute(value=of, attr=flag)], value=value) if (
                entry := _entry(of)
            ) is not None:
                if not OWNERS.isdisjoint(split(flag)):
                    yield entry, (flag, not is_nothing(value))
                elif is_nothing(value) or flag in _asked_for(function):
                    yield entry, (f"{flag}_owner", not is_nothing(value))


def _asked_for(function: Function) -> Set[str]:
    """`vessel` of `next(b for b in self.berths if b.vessel is None)`: which of them has none."""
    return {
        test.left.attr
        for node in function.nodes
        for each in _conditions(node)
        for test in walk(each)
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Attribute)
        if isinstance(test.ops[0], ast.Is) and is_nothing(test.comparators[0])
    }


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.For(body=body):
            yield from (each.test for each in body if isinstance(each, ast.If))
        case ast.comprehension(ifs=ifs):
            yield from ifs


def _roots(node: ast.expr) -> set[str]:
    """Of `(number, entry.generation)` both."""
    return {root_of(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])}
