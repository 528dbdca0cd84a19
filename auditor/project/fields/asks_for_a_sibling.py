"""Ends that leave where another field is empty, which the same method fills at times only:

    def take(self, numbered):
        self.path = self.shelf.check_out()
        if numbered:
            self.port = self.ports.assign()

    def end(self):
        if self.port is None:
            return
        self.ports.retire(self.port)
        self.shelf.put_back(self.path)

Whoever took no port keeps the path."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.exits import asks_for, what_decides
from auditor.project.fields.exits_early import is_told_before, is_under_a_test
from auditor.project.fields.filling_again import asked_for, is_none
from auditor.source.nodes import walk


def asks_for_a_sibling(
    method: Function, begun: Function, call: ast.Call, family: Sequence[Function], field: str
) -> bool:
    """All that it asks besides the field is whether there is such another."""
    own = method.owner
    if own is None or method is begun or is_under_a_test(begun, call) or is_told_before(method, field):
        return False
    others = [test for test in what_decides(method, own, field) if not asks_for(test, own, field)]
    siblings = {own_attribute(asked, own) for test in others if (asked := _presence(test)) is not None}
    return (
        bool(others)
        and all(_presence(test) is not None for test in others)
        and None not in siblings
        and all(_is_filled_at_times(name, begun, call, family) for name in siblings if name is not None)
    )


def _presence(test: ast.expr) -> ast.expr | None:
    """`self.port` of `self.port is None`, `not self.port` and `self.port`."""
    asked = asked_for(test)
    return asked if isinstance(asked, ast.Attribute) else None


def _is_filled_at_times(name: str, begun: Function, call: ast.Call, family: Sequence[Function]) -> bool:
    """There, under a test of something else, and nowhere but there."""
    filled = [(each, node) for each in family for node in _filling(each, name)]
    if not filled or any(each is not begun for each, _ in filled):
        return False
    around = [
        node
        for node in begun.statements
        if isinstance(node, ast.If) and all(any(fill is n for n in walk(node)) for _, fill in filled)
    ]
    own = begun.owner or ""
    asked = {
        own_attribute(part, own) for node in around for part in walk(node.test) if isinstance(part, ast.expr)
    }
    return bool(around) and name not in asked and not any(call in list(walk(node)) for node in around)


def _filling(method: Function, name: str) -> Iterator[ast.stmt]:
    for node in method.statements:
        for target, value in assigned_by(node):
            if own_attribute(target, method.owner or "") == name and not is_none(value):
                yield node
