"""Flags that a method sets beside the lease which it puts into an entry."""

import ast
import re
from collections.abc import Iterator, Mapping

from auditor.project.code.bindings import assignments, told_by_position
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.source.nodes import walk


def flags_set(model: ClassModel, function: Function, acquire: ast.Call) -> Mapping[str, bool]:
    """`entry.owned = True`, `Entry(buffer, owned=True)`, and `Entry(buffer, owned)` where the buffer was
    taken `if owned:`, or `if entry.owned:`; of `Saved(slab=slab)` that there is nothing in `inline`, if it
    has nothing there by default and nobody puts anything there later, or that it is `owned` by default."""
    known = dict(_known_at(function, acquire))
    flags = dict(_left_as_they_are(model, function, acquire))
    flags |= {name[1:]: says for name, says in known.items() if name.startswith(".")}
    for field, value in (*_assigned(function), *_told(model, function, acquire)):
        match value:
            case ast.Constant(value=bool() as says):
                flags[field] = says
            case ast.Name(id=name) if name in known:
                flags[field] = known[name]
    return flags


def _left_as_they_are(model: ClassModel, function: Function, acquire: ast.Call) -> Iterator[tuple[str, bool]]:
    """Fields of the record that is made around the lease, or into which it is put, and whether anything is in
    them by default."""
    for made, record in _around(model, function, acquire):
        told = {field_told(model, record, position)[1:] for position, _ in told_by_position(made)}
        yield from _never_set(function, record, told)
    for record in _put_into(model, function, acquire):
        yield from ((field, says) for field, says in _never_set(function, record, set()) if says)


def _never_set(function: Function, record: Class, told: set[str]) -> Iterator[tuple[str, bool]]:
    for field, says in _by_default(record):
        if field not in told and not re.search(rf"\.{field}(?:: [^\n=]+)? = ", function.module.text):
            yield field, says


def _around(model: ClassModel, function: Function, acquire: ast.Call) -> Iterator[tuple[ast.Call, Class]]:
    """Calls that make a record and are told the lease."""
    holders = {
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and any(part is acquire for part in walk(value))
    }
    for made in function.calls:
        given = [*made.args, *(keyword.value for keyword in made.keywords)]
        holds = any(getattr(each, "id", "") in holders or each is acquire for each in given)
        record = model.callee(function, made.func) if holds else None
        if isinstance(record, Class):
            yield made, record


def _put_into(model: ClassModel, function: Function, acquire: ast.Call) -> Iterator[Class]:
    """`job.window = pool.place(n)`, of a job that the function is told."""
    for target, value in assignments(function):
        if value is acquire and isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            record = model.type_of(function, target.value)
            if isinstance(record, Class) and target.value.id != function.owner:
                yield record


def _by_default(record: Class) -> Iterator[tuple[str, bool]]:
    """`inline: bytes | None = None`, `owned: bool = True`"""
    for node in record.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=field), value=ast.Constant(value=None | bool() as says)):
                yield field, says is True


def _assigned(function: Function) -> Iterator[tuple[str, ast.expr]]:
    for target, value in assignments(function):
        if isinstance(target, ast.Attribute):
            yield target.attr, value


def _told(model: ClassModel, function: Function, acquire: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """By those that make a record around the lease, or by all if none is known to."""
    around = [made for made, _ in _around(model, function, acquire)]
    for made in around or function.calls:
        record = model.callee(function, made.func)
        for position, value in told_by_position(made) if isinstance(record, Class) else ():
            assert isinstance(record, Class)
            yield field_told(model, record, position)[1:], value


def _known_at(function: Function, acquire: ast.Call) -> Iterator[tuple[str, bool]]:
    """Names, and `.fields` of objects, that the branches around the call ask for."""
    for node in function.statements:
        name = _asked(node.test) if isinstance(node, ast.If) else ""
        if name and isinstance(node, ast.If):
            for suite, says in ((node.body, True), (node.orelse, False)):
                if any(part is acquire for each in suite for part in walk(each)):
                    yield name, says


def _asked(test: ast.expr) -> str:
    match test:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(), attr=field):
            return f".{field}"
    return ""
