"""Whether one way through a function comes by two calls."""

import ast
from collections.abc import Iterator, Sequence

from auditor.ir.ops import RAISING, Call, Next
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def comes_by_both(function: Function, one: ast.Call, other: ast.Call, *, behind_loops: bool = False) -> bool:
    """Some way comes by both calls, in one turn of its loops; or `behind_loops`, where no loop has both."""
    ops, found = function.graph.ops, {}
    for at in (one, other):
        found[id(at)] = {node for node, op in enumerate(ops) if isinstance(op, Call) and op.at is at}
    turns = not behind_loops or _are_in_one_loop(function, one, other)
    return any(
        found[id(last)] & set(_following(function, found[id(first)], turns))
        for first, last in ((one, other), (other, one))
    )


def _are_in_one_loop(function: Function, one: ast.Call, other: ast.Call) -> bool:
    """Behind the loop in which the one is, the other comes in no other turn."""
    loops = (node for node in function.nodes if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    return any({id(one), id(other)} <= {id(part) for part in walk(loop)} for loop in loops)


def reads_beside(function: Function, calls: Sequence[ast.Call], field: str) -> bool:
    """Some way that comes by one of these calls reads such a field; what is told a call of another way,
    `self.drop(job)`, `continue`, and `self.run(job.row)` below, has nothing to do with it."""
    reads = [n for n in function.own_nodes if isinstance(n, ast.Attribute) and n.attr == field]
    return any(
        isinstance(node.ctx, ast.Load)
        and not any(_is_told(each, node) and _lies_apart(function, each, calls) for each in function.calls)
        for node in reads
    )


def _is_told(call: ast.Call, node: ast.AST) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(node is each for each in given)


def _lies_apart(function: Function, call: ast.Call, calls: Sequence[ast.Call]) -> bool:
    return not any(comes_by_both(function, call, each, behind_loops=True) for each in calls)


def _following(function: Function, nodes: set[int], turns: bool) -> Iterator[int]:
    graph, seen, waiting = function.graph, set(nodes), list(nodes)
    while waiting:
        for node, edge in graph.successors[waiting.pop()]:
            next_turn = turns and isinstance(graph.ops[node], Next)
            if node not in seen and edge not in RAISING and not next_turn:
                seen.add(node)
                waiting.append(node)
                yield node
