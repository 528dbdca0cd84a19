"""Whether one way through a function comes by two calls."""

import ast
from collections.abc import Iterator

from auditor.ir.ops import RAISING, Call, Next
from auditor.project.code.modules import Function


def comes_by_both(function: Function, one: ast.Call, other: ast.Call) -> bool:
    """Some way comes by both calls, in one turn of its loops."""
    ops, found = function.graph.ops, {}
    for at in (one, other):
        found[id(at)] = {node for node, op in enumerate(ops) if isinstance(op, Call) and op.at is at}
    return any(
        found[id(last)] & set(_following(function, found[id(first)]))
        for first, last in ((one, other), (other, one))
    )


def _following(function: Function, nodes: set[int]) -> Iterator[int]:
    graph, seen, waiting = function.graph, set(nodes), list(nodes)
    while waiting:
        for node, edge in graph.successors[waiting.pop()]:
            if node not in seen and edge not in RAISING and not isinstance(graph.ops[node], Next):
                seen.add(node)
                waiting.append(node)
                yield node
