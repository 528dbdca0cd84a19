"""Fields of one object that are filled together: `request.node, request.own = node, own`. Whoever works with
the one knows that the other is full as well."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling
from auditor.project.fields.forgetting import INITIAL
from auditor.source.nodes import walk


def works_with_what_came_along(filling: Filling, family: Sequence[Function]) -> bool:
    """Above the store the method reads a field of the object that nobody fills without this one."""
    method, owner, field = filling.method, filling.owner, filling.field
    if filling.key is not None:
        return False
    tests = [test for node in method.nodes if isinstance(test := getattr(node, "test", None), ast.AST)]
    asked = {id(node) for test in tests for node in walk(test)}
    read = {
        node.attr
        for node in method.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and getattr(node.value, "id", None) == owner
        and node.lineno < filling.line
        and id(node) not in asked
    } - {field, *_set_above(filling), *_there_from_the_start(filling)}
    others = [each for each in family if each is not method and each.name not in INITIAL]
    filled = [set(_filled_together(each)) for each in others if f".{field}" in each.text]
    along = {name for names in filled for owned, name in names if (owned, field) in names}
    alone = {
        name
        for names in map(set, map(_filled_together, others))
        for owned, name in names
        if (owned, field) not in names
    }
    return bool(read & along - alone)


def _set_above(filling: Filling) -> Iterator[str]:
    """`request.prefix, node = self.match(request)`: what the method itself put there says nothing."""
    for node in filling.method.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Store(), lineno=line):
                if name == filling.owner and line < filling.line:
                    yield attr


def _there_from_the_start(filling: Filling) -> Iterator[str]:
    """`tokens` of a record that says `tokens: list[int]`, without a default, or is told them at birth."""
    for cls in filling.method.module.classes.values():
        if f"{filling.field}" not in cls.text:
            continue
        for node in cls.node.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), value=None):
                    yield name
        init = cls.methods.get("__init__")
        for target, value in assignments(init) if init is not None else ():
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name):
                yield target.attr


def _filled_together(method: Function) -> Iterator[tuple[str, str]]:
    """The objects, none of them its own, and which of their fields it puts something into, and not more."""
    for target, value in assignments(method):
        match target:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name != method.owner:
                more = any(getattr(node, "attr", "") == attr for node in walk(value))
                if not (more or isinstance(value, ast.Constant | ast.List)):
                    yield name, attr
