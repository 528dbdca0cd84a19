"""Calls whose answer says that they have the lease now: `if hook(key, lease): return True`, or `if not
door.accept(lease): pool.put(lease)`."""

import re
from collections.abc import Set

from auditor.flow.operands import operands, uses
from auditor.ir.graph import Graph
from auditor.ir.ops import RESULT, Assume, Call, Constant, Edge, EndStatement, Move, Nop

TAKING = re.compile(
    r"(?:try_|maybe_)?(?:offer|accept|take|adopt|claim|hand|push|put|submit|enqueue|start|launch|admit)(?:_|$)"
)
"""Methods that are asked to have something, as against those that look at it: `if door.fits(key)`."""


def says_it_took(graph: Graph, node: int, released: Set[int]) -> bool:
    """Whether the function does nothing but hand on the answer, where that is true, or gives it back just
    where it is not: whoever answers so was offered the lease, and took it."""
    call = graph.ops[node]
    if not isinstance(call, Call) or not (call.receiver is None or TAKING.match(call.method)):
        return False
    answers = {
        truth: branch
        for branch in _next(graph, node)
        for truth in (True, False)
        if isinstance(op := graph.ops[branch], Assume)
        and (op.subject, op.kind, op.value) == (call.target, "truth", truth)
    }
    if True in answers and _returns_true(graph, answers[True]):
        return True
    named = call.receiver is not None or TAKING.match(call.method)
    refused = named and len(answers) == 2 and _straight_on(graph, answers[False]) & released
    if not refused:
        return False
    accepted, told = _straight_on(graph, answers[True]), {path for _, path in operands(call)}
    used = any(path in told for each in accepted for path in uses(graph.ops[each]))
    return not (used or accepted & released)


def _straight_on(graph: Graph, node: int) -> Set[int]:
    """Up to where the ways part or meet another."""
    passed: set[int] = set()
    following = [node]
    while len(following) == 1 and following[0] not in passed:
        passed.add(following[0])
        following = _next(graph, following[0])
    return passed


def _returns_true(graph: Graph, node: int) -> bool:
    following = list(_next(graph, node))
    made = graph.ops[following[0]] if len(following) == 1 else None
    if not isinstance(made, Constant) or made.value is not True:
        return False
    returned = [graph.ops[each] for each in _next(graph, following[0])]
    return any(isinstance(op, Move) and op.target == RESULT and op.source == made.target for op in returned)


def _next(graph: Graph, node: int) -> list[int]:
    """What comes behind a node, but for ends of statements."""
    found: list[int] = []
    waiting = [node]
    while waiting:
        for each, edge in graph.successors[waiting.pop()]:
            if edge is Edge.NORMAL:
                (waiting if isinstance(graph.ops[each], EndStatement | Nop) else found).append(each)
    return found
