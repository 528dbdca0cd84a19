"""A list or dict that a loop gathers leases in: what it is called, what fills it, who else may know it."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from auditor.fixes.exits import own_nodes, was_asked
from auditor.fixes.life import LOOPS, Life, block_of, enclosing_statement, new_name, statements_in


@dataclass(frozen=True)
class Gathering:
    """`name` is the container, `loop` the statement that fills it, in the block where it began empty; `added`
    are the statements that put something in, with what they put."""

    life: Life
    name: str
    loop: ast.stmt
    added: Mapping[ast.stmt, ast.expr]
    is_dict: bool
    unchecked: bool = False  # nobody asks whether the acquire gave anything, which it may not have

    @cached_property
    def may_lack(self) -> bool:
        """Whether the container may hold None beside leases."""
        if self.unchecked or any(not isinstance(value, ast.Name) for value in self.added.values()):
            return True
        return self.life.is_checked and not all(was_asked(self.life, each) for each in self.added)

    def giving_back(self, margin: str, unit: str) -> list[str]:
        assert self.life.lease.giving_back is not None
        each = new_name("lease", self.life.function)
        release = self.life.lease.giving_back.call.format(each)
        head = f"{margin}for {each} in {self.name}{'.values()' if self.is_dict else ''}:"
        if not self.may_lack:
            return [head, margin + unit + release]
        return [head, f"{margin}{unit}if {each} is not None:", f"{margin}{unit}{unit}{release}"]


def gathering_of(life: Life) -> Gathering | None:
    """The container that the lease is put into, if nothing else is."""
    if life.is_receiver:
        return None  # others in the container may be held by nobody
    for statement in statements_in(life.function.body):
        name, value = _put(statement) if statement.lineno > life.statement.lineno else ("", None)
        if not name or not isinstance(value, ast.Name) or value.id != life.holder:
            continue
        beginning = _beginning(life, name)
        loop = _loop_after(life, beginning) if beginning is not None else None
        if beginning is not None and loop is not None:
            added = {each: put for each in statements_in([loop]) for own, put in [_put(each)] if own == name}
            alike = all(put is not None and _is_lease_or_none(life, put) for put in added.values())
            is_dict = _is_empty_dict(beginning)
            known = {each: put for each, put in added.items() if put is not None}
            return Gathering(life, name, loop, known, is_dict) if alike else None
    return None


def _put(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name of the container that a statement adds to, and what it adds; an empty name for others."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=args)):
            return name, args[0] if len(args) == 1 else None
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))], value=value):
            return name, value
    return "", None


def _beginning(life: Life, name: str) -> ast.stmt | None:
    """The one statement that binds the name, to an empty list or dict."""
    bound = [each for each in statements_in(life.function.body) if _binds(each, name)]
    empty = len(bound) == 1 and (_is_empty_list(bound[0]) or _is_empty_dict(bound[0]))
    return bound[0] if empty else None


def _loop_after(life: Life, beginning: ast.stmt) -> ast.stmt | None:
    """The loop around the acquire that stands in the block where the container began empty."""
    block = list(block_of(life.file, beginning))
    later = block[block.index(beginning) + 1 :]
    loop = next((each for each in later if life.statement in set(statements_in([each]))), None)
    return loop if isinstance(loop, LOOPS) else None


def _binds(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in own_nodes(statement)
    )


def _is_empty_list(statement: ast.stmt) -> bool:
    match getattr(statement, "value", None):
        case ast.List(elts=[]) | ast.Call(func=ast.Name(id="list"), args=[], keywords=[]):
            return isinstance(statement, (ast.Assign, ast.AnnAssign))
    return False


def _is_empty_dict(statement: ast.stmt) -> bool:
    match getattr(statement, "value", None):
        case ast.Dict(keys=[]) | ast.Call(func=ast.Name(id="dict"), args=[], keywords=[]):
            return isinstance(statement, (ast.Assign, ast.AnnAssign))
    return False


def _is_lease_or_none(life: Life, value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None
    return isinstance(value, ast.Name) and value.id == life.holder


def is_whole_until(gathering: Gathering, line: int) -> bool:
    """Whether up to that line the container is only filled, counted and returned: all in it is still owed."""
    names = (node for node in ast.walk(gathering.life.function) if is_name(node, gathering.name))
    return all(_is_harmless(gathering, node, ()) for node in names if node.lineno < line)


def is_handed_on(gathering: Gathering, statement: ast.stmt, lent: Sequence[int]) -> bool:
    """Whether after the statement what the container holds may be somebody else's. To calls on the lines
    `lent` it is only lent."""
    for each in (node for node in ast.walk(statement) if is_name(node, gathering.name)):
        returned = isinstance(enclosing_statement(gathering.life.file, each), ast.Return)
        inside = statement is gathering.loop and returned
        if not _is_harmless(gathering, each, lent) or (returned and not inside):
            return True
    return False


def _is_harmless(gathering: Gathering, name: ast.Name, lent: Sequence[int]) -> bool:
    if isinstance(name.ctx, ast.Store):
        return True  # there is one such statement, which makes the container
    parents = gathering.life.file.parents
    parent = parents[name]
    match parents[parent] if isinstance(parent, ast.keyword) else parent:
        case ast.Attribute() | ast.Subscript():
            return enclosing_statement(gathering.life.file, name) in gathering.added
        case ast.Call(func=ast.Name(id="len" | "bool")):
            return True
        case ast.Call(lineno=line):
            return line in lent
        case ast.Return() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.If(test=test) | ast.While(test=test):
            return test is name
    return False


def is_name(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name
