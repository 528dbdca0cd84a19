"""Fields that a method fills again because what is there no longer does: `if self.buffer is None or
self.buffer.numel() < n:`. Whoever asks for its size knows that there may be one; so does who asks for what
was noted of it, `if n > self.size:`, and notes that of the new one."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.protocols.vocabulary import split
from auditor.source.nodes import statements_below, walk

ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
"""Comparisons that no object which has ended answers: too small, too old, worse than this one."""

LIKENESS = (*ORDER, ast.Eq, ast.NotEq)

CLOCKS = frozenset({"step", "steps", "epoch", "iter", "iteration", "time", "now", "tick", "deadline", "round",
                    "generation", "index", "pos", "count", "expires", "expiry", "ttl", "seen"})  # fmt: skip
"""What goes on by itself, so that the one before may have ended in the meantime."""


def outgrown(function: Function, attribute: str, family: list[Function], declared: bool) -> bool:
    """The method itself asks, or another of the class that calls it then; what a library's objects equal may
    be that they have ended."""
    ways = ORDER if declared else LIKENESS
    if any(True for _ in _asking(function, attribute, ways)) or noted(function, attribute):
        return True
    return any(
        _calls_first(node, function.name, method.owner or "")
        for method in family
        if method is not function
        for node in _asking(method, attribute, ways)
    )


def _asking(method: Function, attribute: str, ways: tuple[type[ast.cmpop], ...]) -> Iterator[ast.If]:
    own = method.owner
    for node in method.statements:
        if isinstance(node, ast.If) and own is not None and isinstance(node.test, ast.BoolOp):
            there = any(_asks_whether_there(test, own, attribute) for test in node.test.values)
            if there and any(_compares(test, own, attribute, ways) for test in node.test.values):
                yield node


def noted(method: Function, attribute: str, owner: str | None = None) -> bool:
    """`if score > self.best_score:`, and both `self.best` and `self.best_score` are set; or who asks so
    returns, or goes on to the next, and they are set below. So it is with the fields of an `owner`, and where
    `if self.buffer is None or kind != self.kind:` knows that there may be one."""
    own = owner or method.owner or ""
    for node in method.statements:
        if not isinstance(node, ast.If):
            continue
        below = [each for each in method.statements if each.lineno > (node.end_lineno or 0)]
        leaves = isinstance(node.body[-1], ast.Return | ast.Continue)
        filling = below if leaves else list(statements_below(node))
        written = {own_attribute(to, own) for each in filling for to in _targets(each)}
        sizes = {each for each in written - {attribute} if each and CLOCKS.isdisjoint(split(each))}
        parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        known = any(_asks_whether_there(part, own, attribute) for part in parts)
        ways = LIKENESS if known and not leaves else ORDER
        if attribute in written and any(_compares_what(part, own, sizes, ways) for part in parts):
            return True
    return False


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    return (target for target, _ in assigned_by(statement))


def _compares_what(test: ast.expr, own: str, sizes: set[str], ways: tuple[type[ast.cmpop], ...]) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ways)
        and any(own_attribute(side, own) in sizes for side in (test.left, test.comparators[0]))
    )


def _asks_whether_there(test: ast.expr, own: str, attribute: str) -> bool:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=asked) | ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot()]):
            return own_attribute(asked, own) == attribute
    return own_attribute(test, own) == attribute


def _compares(test: ast.expr, own: str, attribute: str, ways: tuple[type[ast.cmpop], ...]) -> bool:
    """Something of it, with something that is known: not with None, and not with True."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ways):
        return False
    sides = [test.left, test.comparators[0]]
    of_it = [
        side for side in sides if own_attribute(side, own) != attribute and _mentioned([side], own, attribute)
    ]
    fixed = any(isinstance(side, ast.Constant) and not isinstance(side.value, int) for side in sides)
    return len(of_it) == 1 and not fixed


def _calls_first(node: ast.If, name: str, own: str) -> bool:
    """Nothing else is done before that could give back what is there."""
    called = (inner for each in node.body for inner in walk(each) if isinstance(inner, ast.Call))
    first = next(called, None)
    return first is not None and own_attribute(first.func, own) == name


def _mentioned(nodes: list[ast.expr] | list[ast.stmt], own: str, attribute: str) -> bool:
    return any(
        isinstance(inner, ast.expr) and own_attribute(inner, own) == attribute
        for node in nodes
        for inner in walk(node)
    )
