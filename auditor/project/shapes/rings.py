"""Free lists of nodes that know both their neighbours, the ends held by the store: `node = self.root.next` is
unlinked and handed out, and linked in again at either end.

A list of what is to be done looks the same, so it must be filled before anybody asks for anything."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.linked_stores import Taken
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk


def ringed_again(
    lending: Sequence[FieldWork], given: Sequence[FieldWork], begun: Sequence[FieldWork]
) -> Iterator[Taken]:
    """Methods that unlink what they hand out, with those that link in what they are told."""
    filling = [work for work in given if _linked_in(work)]
    for taker in lending if filling else ():
        links = _unlinked(taker)
        givers = [work for work in filling if work is not taker and links & _linked_in(work)]
        if givers and _filled_at_first(begun, givers, links):
            yield taker, givers


def _unlinked(work: FieldWork) -> set[str]:
    """`next` of `node = self.root.next`, `self.root.next = node.next` and `return node`."""
    own = work.method.owner or ""
    returned = {value.id for value in work.returned if isinstance(value, ast.Name)}
    passed = {
        (target.attr, value.value.id)
        for target, value in _with_helpers(work.method)
        if isinstance(target, ast.Attribute)
        and isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Name)
        and target.attr == value.attr
    }
    return {
        value.attr
        for target, value in assignments(work.method)
        if isinstance(value, ast.Attribute) and own_attribute(value.value, own) is not None
        if isinstance(target, ast.Name) and target.id in returned and (value.attr, target.id) in passed
    }


def _linked_in(work: FieldWork) -> set[str]:
    """`next` and `prev` of `last.next = node` and `node.prev = last`, where it is told the node and has the
    neighbour of its own."""
    own = work.method.owner or ""
    told = set(own_parameters(work.method)[:1])
    neighbours = work.derived({own}, frozenset()) - told
    into, of_told = set[str](), set[str]()
    for target, value in assignments(work.method) if told else ():
        if not isinstance(target, ast.Attribute):
            continue
        if mentions(target.value, told, frozenset()):
            of_told.add(target.attr)
        elif isinstance(value, ast.Name) and value.id in told and mentions(target, neighbours, frozenset()):
            into.add(target.attr)
    return into | of_told if into and of_told else set()


def _with_helpers(method: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What it assigns; a helper that is told of the node has the same name for it, or another one."""
    yield from assignments(method)
    helpers = method.cls.methods if method.cls is not None else {}
    for call in method.calls:
        helper = helpers.get(own_attribute(call.func, method.owner or "") or "")
        match call.args:
            case [ast.Name(id=name)] if helper is not None and helper is not method:
                for target, value in assignments(helper):
                    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                        told = value.value.id in own_parameters(helper)[:1]
                        yield target, ast.Attribute(ast.Name(name), value.attr) if told else value


def _filled_at_first(begun: Sequence[FieldWork], givers: Sequence[FieldWork], links: set[str]) -> bool:
    """A loop of the constructor gives them one by one, or links them."""
    names = {work.method.name for work in givers}
    loops = (
        node for work in begun for node in work.method.statements if isinstance(node, ast.For | ast.While)
    )
    return any(
        (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in names)
        or (isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and each.attr in links)
        for loop in loops
        for each in walk(loop)
    )
