"""Flags that a method sets beside the lease which it puts into an entry."""

import ast
from collections.abc import Iterator, Mapping

from auditor.project.code.bindings import assignments, told_by_position
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.source.nodes import walk


def flags_set(model: ClassModel, function: Function, acquire: ast.Call) -> Mapping[str, bool]:
    """`entry.owned = True`, `Entry(buffer, owned=True)`, and `Entry(buffer, owned)` where the buffer was
    taken `if owned:`, or `if entry.owned:`."""
    known = dict(_known_at(function, acquire))
    flags = {name[1:]: says for name, says in known.items() if name.startswith(".")}
    for field, value in (*_assigned(function), *_told(model, function)):
        match value:
            case ast.Constant(value=bool() as says):
                flags[field] = says
            case ast.Name(id=name) if name in known:
                flags[field] = known[name]
    return flags


def _assigned(function: Function) -> Iterator[tuple[str, ast.expr]]:
    for target, value in assignments(function):
        if isinstance(target, ast.Attribute):
            yield target.attr, value


def _told(model: ClassModel, function: Function) -> Iterator[tuple[str, ast.expr]]:
    for made in function.calls:
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
