"""Flags of given objects by which whoever ends them gives a field back, and which one of those that fill the
field leaves as they are, or says no: `request.owns_seat` stays False, so that `detach(request)` passes the
seat over."""

import ast
import re
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.code.project import Project
from auditor.project.fields.exits import parts_of
from auditor.source.nodes import walk


def passed_over(project: Project, function: Function, filling: Function, field: str) -> Set[int]:
    """Where the function reads the field under such a flag of the same object."""
    found = set[int]()
    spoken_of = {getattr(node, "attr", "") for node in filling.nodes} - _lowered(filling)
    for node in function.statements if function is not filling else ():
        for owner, flag in _asked(node):
            if flag != field and flag not in spoken_of and _stays_down(project, flag, field, filling):
                below = [inner for each in getattr(node, "body", []) for inner in walk(each)]
                found |= {id(inner) for inner in below if _is_field(inner, owner, field)}
                names = {inner.id for inner in below if isinstance(inner, ast.Name)}
                found |= {
                    id(value)
                    for target, value in assignments(function)
                    if _is_field(value, owner, field) and getattr(target, "id", "") in names
                }
    return found


def _lowered(filling: Function) -> set[str]:
    """Fields that it does no more with than set them to False."""
    lowered = {id(target) for target, value in assignments(filling) if _is_false(value)}
    spoken_of = [node for node in filling.nodes if isinstance(node, ast.Attribute)]
    return {node.attr for node in spoken_of} - {node.attr for node in spoken_of if id(node) not in lowered}


def _is_field(node: ast.AST, owner: str, field: str) -> bool:
    return isinstance(node, ast.Attribute) and own_attribute(node, owner) == field


def _asked(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """`if request.owned:`, `if request.owned and ...:`"""
    if not isinstance(node, ast.If):
        return
    joined = not isinstance(node.test, ast.BoolOp) or isinstance(node.test.op, ast.And)
    for part in parts_of(node.test) if joined else ():
        match part:
            case ast.Attribute(value=ast.Name(id=owner), attr=flag):
                yield owner, flag


def _stays_down(project: Project, flag: str, field: str, filling: Function) -> bool:
    """It is False at first, and only those raise it who fill the field themselves, as `filling` does not."""
    told = re.compile(rf"(?<![.\w]){flag}\s*=(?!=)|[\"']{flag}[\"']")
    read = {module.path: module for module in project.parsed()}
    speaking = [path for path, _ in project.mentioning(flag)]
    if any(path not in read or told.search(read[path].text) for path in speaking):
        return False
    modules = [read[path] for path in speaking]
    records = [cls for module in modules for cls in module.classes.values() if flag in _flags(cls)]
    functions = [each for module in modules for each in module.by_node.values()]
    return (
        any(field in _flags(cls) for cls in records)
        and all(_is_false(_flags(cls)[flag]) for cls in records)
        and not any(_tells(call, cls, flag) for each in project.parsed() for cls in records
                    for function in each.by_node.values() for call in function.calls)
        and all(_raises_its_own(each, flag, field, filling) for each in functions)
    )  # fmt: skip


def _flags(cls: Class) -> dict[str, ast.expr | None]:
    """Fields that the class names with what they hold at first."""
    named = (each for each in cls.node.body if isinstance(each, ast.AnnAssign))
    return {each.target.id: each.value for each in named if isinstance(each.target, ast.Name)}


def _is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _tells(call: ast.Call, cls: Class, flag: str) -> bool:
    """`Request(name, None, True)`"""
    if last_part(call.func) not in (cls.name, "replace"):
        return False
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    unknown = starred or any(each.arg is None for each in call.keywords)
    return unknown or len(call.args) > list(_flags(cls)).index(flag)


def _raises_its_own(function: Function, flag: str, field: str, filling: Function) -> bool:
    stored = [
        (target.attr, value) for target, value in assignments(function) if isinstance(target, ast.Attribute)
    ]
    raising = any(name == flag and not _is_false(value) for name, value in stored)
    fills = any(name == field for name, _ in stored) and function is not filling
    return not raising or (fills and not any(last_part(c.func) == filling.name for c in function.calls))
