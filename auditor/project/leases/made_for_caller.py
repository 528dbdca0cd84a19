"""Whether what a function returns with a lease inside was made by it: then nobody else knows that object."""

import ast
from collections.abc import Iterator

from auditor.flow.knowledge import EXTENDING, FILLING
from auditor.ir.ops import Path
from auditor.ir.record_copies import copies_a_record
from auditor.project.code.bindings import assigned_by, given_to, ways
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import split

CACHING = frozenset({"cache", "cached", "memoize", "memoized", "singleton"})
"""Words in the names of decorators by which whoever calls is shown the same object."""


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
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Name):
        listed = _listed(value)
        if listed is not None:
            return all(_is_made(recogniser, function, each, seen) for each in listed)
        return _is_none(value) or _constructs(recogniser, function, value)
    bound = (way for each in given_to(function, value.id) for way in ways(each))
    given = [*bound, *_put_into(function, value.id)]
    return value.id in seen or (
        any(not _is_none(each) for each in given)
        and all(_is_made(recogniser, function, each, (*seen, value.id)) for each in given)
        and _is_known_to_nobody(recogniser, function, value.id)
    )


def _listed(value: ast.expr) -> list[ast.expr] | None:
    """What a list holds that is made right there."""
    match value:
        case ast.List(elts=elements):
            return elements
        case ast.ListComp(elt=element):
            return [element]
    return None


def _put_into(function: Function, name: str) -> Iterator[ast.expr]:
    for call in function.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=receiver), attr=method), args=[*_, value]) if (
                receiver == name and method in FILLING
            ):
                yield value
            case ast.Call(func=ast.Attribute(value=ast.Name(id=receiver), attr=method)) if (
                receiver == name and method in EXTENDING
            ):
                yield call  # of things that have been elsewhere


def _constructs(recogniser: Recogniser, function: Function, value: ast.expr) -> bool:
    """A class of the project that does not end itself when it is dropped, a function that makes one, or a
    copy of one."""
    if not isinstance(value, ast.Call):
        return False
    if copies_a_record(value):
        return True
    targets, made, _ = recogniser.calls.targets(function, value)
    if made is not None:
        return not {"__del__", "__new__"} & made.methods.keys()
    return bool(targets) and all(_makes(recogniser, target) for target in targets)


def _makes(recogniser: Recogniser, target: Function) -> bool:
    """It is known to, with a lease inside; or all that it returns it constructs right there, without one."""
    if (source := recogniser.wrappers.get(target)) is not None:
        return source.fresh
    calls = [node.value for node in target.statements if isinstance(node, ast.Return) and node.value]
    made = (recogniser.calls.targets(target, call)[1] for call in calls if isinstance(call, ast.Call))
    ends = [not {"__del__", "__new__"} & cls.methods.keys() for cls in made if cls is not None]
    return bool(ends) and len(ends) == len(calls) and all(ends)


def _is_known_to_nobody(recogniser: Recogniser, function: Function, name: str) -> bool:
    """Plain assignments bind the name, and all that is done with it is `context.engine`, a question whether
    it is there, another name for it, `return context`, and calls of functions that only touch it."""
    nodes = list(function.nodes)
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    harmless = {id(part) for node in nodes for part in _touched(node)}
    harmless.update(id(part) for call in function.calls for part in _shown(recogniser, function, call))
    read = [node for node in named if isinstance(node.ctx, ast.Load)]
    bound = len(list(given_to(function, name))) + sum(_is_declared(node, name) for node in nodes)
    return len(named) - len(read) == bound and all(id(node) in harmless for node in read)


def _shown(recogniser: Recogniser, function: Function, call: ast.Call) -> Iterator[ast.expr]:
    """Arguments that no function it may call does anything with but touch their fields."""
    named = [(n, each) for n, each in enumerate(call.args) if isinstance(each, ast.Name)]
    targets = recogniser.calls.targets(function, call)[0] if named else ()
    for position, argument in named if targets else ():
        told = [own_parameters(target)[position : position + 1] for target in targets]
        if all(one and _only_touches(target, one[0]) for target, one in zip(targets, told, strict=True)):
            yield argument


def _only_touches(target: Function, name: str) -> bool:
    returned = {id(each) for node in target.nodes if isinstance(node, ast.Return) for each in _touched(node)}
    harmless = {id(part) for node in target.nodes for part in _touched(node)} - returned
    named = (node for node in target.nodes if isinstance(node, ast.Name) and node.id == name)
    return all(isinstance(node.ctx, ast.Load) and id(node) in harmless for node in named)


def _is_declared(node: ast.AST, name: str) -> bool:
    """`best: Draft | None`."""
    return isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == name and node.value is None


def _touched(node: ast.AST) -> list[ast.expr | None]:
    match node:
        case ast.Return(value=ast.Tuple(elts=values)):
            return list(values)
        case (
            ast.Attribute(value=value)
            | ast.Return(value=value)
            | ast.Yield(value=value)
            | ast.UnaryOp(op=ast.Not(), operand=value)
        ):
            return [value]
        case ast.Compare(left=value, comparators=[ast.Constant(value=None)]):
            return [value]
        case ast.Assign():
            return [value for target, value in assigned_by(node) if isinstance(target, ast.Name)]
        case ast.If(test=test):
            return [test]
        case ast.BoolOp(values=values):
            return list(values)
    return []


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
