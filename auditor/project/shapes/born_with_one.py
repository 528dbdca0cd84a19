"""Counts that begin at one, since whoever makes the object is its first user: `self.tenants = 1`, `join()`
raises them, and with the last that `leave()` lowers something is given back. No name has to say so. So do
counts in a table, `self.users[handle] = 1`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.use_counts import counted, struck_off
from auditor.source.nodes import walk


def counts_from_one(begins: Function, ends: Function, count: str) -> bool:
    """Whether the two are told nothing, and the one asks for none left and then does something about it."""
    cls = ends.cls
    told = own_parameters(begins) or own_parameters(ends)
    return cls is not None and not told and count in _ones(cls) and _does_at_none(ends, count)


def entered_with_one(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`self.users[handle] = 1; return handle`, and who lowers the `self.users[handle]` of one that it is
    told, and strikes it off with the last; the same of `self.entries[handle] = Entry(thing, 1)`."""
    text = methods[0].cls.text if methods and methods[0].cls is not None else ""
    if "] = " not in text or " -= 1" not in text:
        return
    entered = {id(method): set(_entered_and_returned(method)) for method in methods}
    for ends in methods if any(entered.values()) else ():
        struck = struck_off(ends)
        struck &= counted(ends, ast.Sub) | set(_lowered_in_records(ends)) if struck else struck
        for begins in methods if struck else ():
            if begins is not ends and entered[id(begins)] & struck:
                yield begins, ends


def _entered_and_returned(method: Function) -> Iterator[str]:
    """Tables in which it enters a one for what it returns, and was not told."""
    returned = {
        node.value.id
        for node in method.statements
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    } - set(method.parameters)
    for target, value in assignments(method) if returned else ():
        match target:
            case ast.Subscript(value=table, slice=ast.Name(id=key)) if key in returned:
                if _holds_one(value) and (field := own_attribute(table, method.owner or "")) is not None:
                    yield field


def _holds_one(value: ast.expr) -> bool:
    """`1`, `Entry(thing, 1)`, `Entry(thing, users=1)`, `[thing, 1]`."""
    match value:
        case ast.Call(args=args, keywords=keywords):
            parts = [*args, *(each.value for each in keywords)]
        case ast.List(elts=parts):
            pass
        case _:
            parts = [value]
    return any(_is_number(each, 1) for each in parts)


def _lowered_in_records(ends: Function) -> Iterator[str]:
    """Tables of `entry = self.entries[handle]`, `entry.users -= 1`."""
    own = ends.owner or ""
    for node in ends.statements:
        match node:
            case ast.AugAssign(
                target=ast.Attribute(value=record) | ast.Subscript(value=record, slice=ast.Constant()),
                op=ast.Sub(),
                value=value,
            ) if _is_number(value, 1):
                found = given_to(ends, record.id) if isinstance(record, ast.Name) else [record]
                for place in found:
                    match place:
                        case (
                            ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table, attr="get"))
                        ) if (field := own_attribute(table, own)) is not None:
                            yield field


def _ones(cls: Class) -> Iterator[str]:
    """Fields that are 1 at birth."""
    init = cls.methods.get("__init__")
    for target, value in assignments(init) if init is not None else ():
        if init is not None and (name := own_attribute(target, init.owner or "")) and _is_number(value, 1):
            yield name
    for node in cls.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _is_one(value):
                yield name


def _is_one(default: ast.expr) -> bool:
    """`1`, `field(default=1)`."""
    match default:
        case ast.Call(keywords=keywords):
            return any(each.arg == "default" and _is_number(each.value, 1) for each in keywords)
    return _is_number(default, 1)


def _is_number(value: ast.expr, number: int) -> bool:
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value == number


def _does_at_none(ends: Function, count: str) -> bool:
    """`if self.tenants == 0: self.arena.fill(self.span)`; or it returns where there are others, and does it
    then."""
    own = ends.owner or ""
    for node in ends.statements:
        if not isinstance(node, ast.If):
            continue
        asked = _says(node.test, own, count)
        done = node.body if asked == "none" else [*node.orelse, *_behind(ends, node)]
        doing = [each for each in done if not isinstance(each, ast.Raise)]
        if asked and any(isinstance(each, ast.Call) for statement in doing for each in walk(statement)):
            return True
    return False


def _behind(ends: Function, choice: ast.If) -> list[ast.stmt]:
    """What is left to do where the choice has not returned."""
    if not isinstance(choice.body[-1], ast.Return):
        return []
    return [each for each in ends.statements if each.lineno > (choice.end_lineno or choice.lineno)]


def _says(test: ast.expr, own: str, count: str) -> str:
    """Whether none is left where the test holds, or some."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand) if own_attribute(operand, own) == count:
            return "none"
        case ast.Compare(left=left, ops=[op], comparators=[zero]):
            if own_attribute(left, own) != count or not _is_number(zero, 0):
                return ""
            return "none" if isinstance(op, ast.Eq | ast.LtE) else "some"
    return "some" if own_attribute(test, own) == count else ""
