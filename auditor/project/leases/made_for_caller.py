"""Whether what a function returns with a lease inside was made by it: then nobody else knows that object."""

import ast

from auditor.ir.ops import Path
from auditor.ir.record_copies import copies_a_record
from auditor.project.code.bindings import given_to, ways
from auditor.project.code.modules import Function, last_part
from auditor.project.leases.known_to_nobody import ORDERING, elements, is_known_to_nobody, put_into
from auditor.project.meaning.recognise import Recogniser
from auditor.protocols.vocabulary import split

CACHING = frozenset({"cache", "cached", "memoize", "memoized", "singleton"})
"""Words in the names of decorators by which whoever calls is shown the same object."""

RECORDS = frozenset({"SimpleNamespace"})
"""What the standard library has for a record of anything."""


def made_for_caller(recogniser: Recogniser, function: Function, place: Path = ()) -> bool:
    """Every return gives None or an object of the project made right there: `return Context(lease)`, or
    `context = Context(lease)`, of which only fields are touched before `return context`. What another
    function has made for this one is as good, and so is a list of nothing but those: `[Beam(row) for row in
    rows]`, `beams.append(Beam(row))`. Of a tuple it is asked of the part at `place`, of `Context(lease)
    if lease else None` of both ways."""
    returned = (value for value in map(_given, function.statements) if value is not None)
    given = (_part(way, place) for value in returned for way in ways(value))
    made = [value for value in given if not _is_none(value)]
    return bool(made) and all(_is_made(recogniser, function, value) for value in made)


def _given(statement: ast.stmt) -> ast.expr | None:
    match statement:
        case ast.Return(value=value) | ast.Expr(value=ast.Yield(value=value)):
            return value
    return None


def _part(value: ast.expr, place: Path) -> ast.expr:
    if isinstance(value, ast.Tuple) and place[1:]:
        index = place[0].strip("[]")
        return value.elts[int(index)] if index.isdecimal() and int(index) < len(value.elts) else value
    return value


def shows_the_same(function: Function) -> bool:
    """`@functools.lru_cache`; not `@mycache_traced`, which is about something else."""
    return any(not CACHING.isdisjoint(split(each)) for each in function.decorators)


def _is_made(recogniser: Recogniser, function: Function, value: ast.expr, seen: tuple[str, ...] = ()) -> bool:
    value = _listed_anew(value.value if isinstance(value, ast.Await) else value)
    if not isinstance(value, ast.Name):
        listed = elements(value)
        if listed is not None:
            return all(_is_made(recogniser, function, each, seen) for each in listed)
        return _is_none(value) or _constructs(recogniser, function, value)
    bound = (way for each in given_to(function, value.id) for way in ways(each))
    given = [*bound, *put_into(function, value.id)]
    return value.id in seen or (
        any(not _is_none(each) for each in given)
        and all(_is_made(recogniser, function, each, (*seen, value.id)) for each in given)
        and is_known_to_nobody(recogniser, function, value.id)
    )


def _listed_anew(value: ast.expr) -> ast.expr:
    """`out` of `sorted(out)`, `out[::-1]` and `out or None`."""
    match value:
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name in ORDERING:
            return _listed_anew(inner)
        case ast.Subscript(value=ast.Name() as inner, slice=ast.Slice()):
            return inner
        case ast.BoolOp(op=ast.Or(), values=[inner, ast.Constant(value=None)]):
            return inner
    return value


def _constructs(recogniser: Recogniser, function: Function, value: ast.expr) -> bool:
    """A class of the project that does not end itself when it is dropped, a function that makes one, or a
    copy of one."""
    if not isinstance(value, ast.Call):
        return False
    if copies_a_record(value) or last_part(value.func) in RECORDS:
        return True
    targets, made, _ = recogniser.calls.targets(function, value)
    if made is not None:
        return not {"__del__", "__new__"} & made.methods.keys()
    return bool(targets) and all(_makes(recogniser, target) for target in targets)


def _makes(recogniser: Recogniser, target: Function, seen: tuple[Function, ...] = ()) -> bool:
    """It is known to, with a lease inside; or all that it returns it constructs right there, without one."""
    if (source := recogniser.wrappers.get(target)) is not None:
        return source.fresh
    returned = [node.value for node in target.statements if isinstance(node, ast.Return) and node.value]
    return bool(returned) and all(_is_made_there(recogniser, target, each, seen) for each in returned)


def _is_made_there(
    recogniser: Recogniser, target: Function, value: ast.expr, seen: tuple[Function, ...]
) -> bool:
    """`return Lease(row)`; `lease = Lease(row)`, `self.ends[lease.token] = lease.end` and `return lease`."""
    if isinstance(value, ast.Name):
        given = list(given_to(target, value.id))
        made = bool(given) and all(isinstance(each, ast.Call) for each in given)
        if not (made and is_known_to_nobody(recogniser, target, value.id)):
            return False
        return all(_is_made_there(recogniser, target, each, seen) for each in given)
    if not isinstance(value, ast.Call) or target in seen:
        return False
    if last_part(value.func) in RECORDS:
        return True
    targets, cls, _ = recogniser.calls.targets(target, value)
    if cls is not None:
        return not {"__del__", "__new__"} & cls.methods.keys()
    return bool(targets) and all(_makes(recogniser, each, (*seen, target)) for each in targets)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
