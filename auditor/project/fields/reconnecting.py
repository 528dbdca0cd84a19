"""Methods that fill a field, called again by a handler because work with what is in the field has failed."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

NOTHING_THERE = frozenset({"AttributeError", "TypeError", "NameError"})
"""Failures by which a field turns out to be empty."""


def refilled_by_a_handler(opening: Function, family: Sequence[Function], attribute: str, line: int) -> bool:
    """`try: self.sock.send(data)`, `except OSError: self.connect()`: what failed is still open, and neither
    the handler nor `connect`, which stores another on this line, has looked at it."""
    own = opening.owner
    if own is None or _touched(opening.node, own, family, attribute, line):
        return False
    fields = {attribute, *_made_of(opening, own, attribute)}
    return any(
        any(_uses(guarded.body, name, field) for field in fields)
        and _calls_untouched(handler, name, opening, family, attribute)
        for method in family
        if method is not opening and (name := method.owner) is not None
        for guarded in method.nodes
        if isinstance(guarded, ast.Try)
        for handler in guarded.handlers
    )


def refilled_in_its_handler(method: Function, attribute: str, line: int) -> bool:
    """`try: return self.box.run(code)`, `except Died: self.box = self.pool.take()` on this line: the one that
    failed came out of the pool, too."""
    own = method.owner
    for guarded in method.of_kind(ast.Try) if own is not None else ():
        for handler in guarded.handlers:
            caught = set() if handler.type is None else {*_named(handler.type)}
            stores = any(getattr(node, "lineno", 0) == line for each in handler.body for node in walk(each))
            if not stores or (caught and caught <= NOTHING_THERE) or own is None:
                continue
            calls = [node for each in handler.body for node in walk(each) if isinstance(node, ast.Call)]
            ended = any(ENDING.search(last_name(call)) for call in calls)
            if _uses(guarded.body, own, attribute) and not ended:
                return not _touched(handler, own, (), attribute, line)
    return False


def _made_of(opening: Function, own: str, attribute: str) -> Iterator[str]:
    """`self.channel = self.connection.channel()`: who works with the one works with the other."""
    for node in walk(opening.node):
        match node:
            case ast.Assign(targets=targets, value=ast.Call(func=ast.Attribute(value=maker))) if (
                own_attribute(maker, own) == attribute
            ):
                yield from filter(None, (own_attribute(target, own) for target in targets))


def _uses(body: list[ast.stmt], own: str, attribute: str) -> bool:
    """`self.sock.send(...)`, and nothing in it speaks of an end."""
    used = [
        node.attr
        for statement in body
        for node in walk(statement)
        if isinstance(node, ast.Attribute) and own_attribute(node.value, own) == attribute
    ]
    return bool(used) and not any(map(ENDING.search, used))


def _calls_untouched(
    handler: ast.ExceptHandler, own: str, opening: Function, family: Sequence[Function], attribute: str
) -> bool:
    caught = set() if handler.type is None else {*_named(handler.type)}
    if caught and caught <= NOTHING_THERE:
        return False
    again = (call for call in _own_calls(handler, own) if last_name(call) == opening.name)
    first = min((call.lineno for call in again), default=None)
    others = [method for method in family if method is not opening]
    return first is not None and not _touched(handler, own, others, attribute, first)


def _touched(scope: ast.AST, own: str, family: Sequence[Function], attribute: str, line: int) -> bool:
    """Up to the line the field is read or emptied, by itself or in a method that is called, or its end is
    spoken of."""
    before = [node for node in walk(scope) if getattr(node, "lineno", line + 1) <= line]
    reads = any(
        isinstance(node, ast.Attribute)
        and own_attribute(node, own) == attribute
        and (isinstance(node.ctx, ast.Load) or node.lineno < line)
        for node in before
    )
    called = {last_name(call) for call in _own_calls(scope, own) if call.lineno <= line}
    return (
        reads
        or any(map(ENDING.search, called))
        or any(method.name in called and f".{attribute}" in method.text for method in family)
    )


def _own_calls(scope: ast.AST, own: str) -> Iterator[ast.Call]:
    for node in walk(scope):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name == own:
                yield node


def _named(node: ast.expr) -> Iterator[str]:
    for each in node.elts if isinstance(node, ast.Tuple) else [node]:
        yield each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")
