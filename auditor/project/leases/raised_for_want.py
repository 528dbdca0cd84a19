"""Acquires that raise, in so many words, where there is nothing to lend: `raise PoolEmpty` in the pool, or in
what it asks. Whoever holds something already and asks for more is told of it that way."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.guards import caught_by
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.source.nodes import walk

MISUSE = re.compile(
    r"^(?:Value|Type|Key|Index|Lookup|Attribute|Assertion|NotImplemented)Error$|Clos|Shut|Stop|Invalid|Unknown"
)
"""What is wrong with the question, or with a pool that is no more, is no want."""

FARTHEST = 4
"""So many functions ask one another."""


def raises_for_want(recogniser: Recogniser, function: Function, call: ast.Call) -> bool:
    """Whether this call of an acquire may raise so, and no `try` of the function is for a failure of it."""
    raised = {name for name in _raised_by(recogniser, function, call, FARTHEST) if not MISUSE.search(name)}
    return bool(raised) and not any(_is_tried(function, call))


def _is_tried(function: Function, call: ast.AST) -> Iterator[bool]:
    """By each handler around it."""
    for node in function.statements:
        if isinstance(node, ast.Try | ast.TryStar) and _within(call, node.body):
            yield from (True for _ in node.handlers)


def _raised_by(recogniser: Recogniser, function: Function, call: ast.Call, depth: int) -> frozenset[str]:
    targets, constructed, _ = recogniser.calls.targets(function, call)
    if len(targets) != 1 or constructed is not None or depth == 0:
        return frozenset()
    lends = targets[0] in recogniser.acquiring or targets[0] in recogniser.wrappers
    return frozenset(_raised_in(recogniser, targets[0], depth - 1)) if lends else frozenset()


def _raised_in(recogniser: Recogniser, function: Function, depth: int) -> Iterator[str]:
    """The classes of its own `raise` outside any `try`, those that a handler passes on, and those of the
    acquires that it asks."""
    statements = list(function.statements)
    tries = [node for node in statements if isinstance(node, ast.Try | ast.TryStar) and node.handlers]
    for node in statements:
        raised = node.exc if isinstance(node, ast.Raise) else None
        if raised is not None and not any(_within(node, each.body) for each in tries):
            named = raised.func if isinstance(raised, ast.Call) else raised
            yield getattr(named, "attr", "") or getattr(named, "id", "")
    for handler in (each for node in tries for each in node.handlers):
        if any(isinstance(node, ast.Raise) and node.exc is None for node in walk(handler)):
            yield from re.findall(r"\w+", caught_by(handler) or "")
    for call in function.calls:
        if not any(_within(call, each.body) for each in tries):
            yield from _raised_by(recogniser, function, call, depth)


def _within(node: ast.AST, body: list[ast.stmt]) -> bool:
    return any(part is node for statement in body for part in walk(statement))
