"""Whether some way through a function comes to two calls, one after the other."""

import ast

from auditor.ir.graph import Graph, TooLarge
from auditor.ir.ops import RAISING
from auditor.project.code.modules import Function


def on_one_way(function: Function, one: ast.Call, other: ast.Call) -> bool:
    """`self.close(key)` and `self.fail(key)` in two branches, each before a `return`, are on none. Of what
    cannot be followed it is not known, so they may be."""
    try:
        graph = function.graph
    except (TooLarge, RecursionError):
        return True
    first, second = _nodes(graph, one), _nodes(graph, other)
    if not first or not second:
        return True  # in an inner function
    return bool(_behind(graph, first) & second or _behind(graph, second) & first)


def _nodes(graph: Graph, call: ast.Call) -> set[int]:
    return {node for node, op in enumerate(graph.ops) if getattr(op, "at", None) is call}


def _behind(graph: Graph, nodes: set[int]) -> set[int]:
    seen: set[int] = set()
    pending = list(nodes)
    while pending:
        for following, edge in graph.successors[pending.pop()]:
            if edge not in RAISING and following not in seen:
                seen.add(following)
                pending.append(following)
    return seen
