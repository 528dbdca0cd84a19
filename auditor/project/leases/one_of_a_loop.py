"""Leases that come as a list which a loop goes over at once: `for page in pool.take(n):`. As one of a list
they are all seen to where one of them is; each is followed by itself from the head of the loop on, to the
next turn, where a name that outlives its turn (`best = page`) may lose the one of the turn before."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace

from auditor.flow.effects import Acquisition, Handle
from auditor.flow.follow import Followed, follow_from
from auditor.flow.knowledge import Knowledge
from auditor.flow.operands import uses
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, Call, Edge, Move, Next
from auditor.project.code.modules import Function
from auditor.project.meaning.effects import FunctionEffects


def in_their_turns(
    function: Function,
    effects: FunctionEffects,
    acquisition: Acquisition,
    site: int,
    known: Mapping[int, Knowledge],
    edges: frozenset[Edge],
) -> Iterator[Followed]:
    """Where the loop is all that is done with the list, and gives some of them back itself."""
    graph: Graph = function.graph
    op = graph.ops[site]
    assert isinstance(op, Call)
    if acquisition.handle is not Handle.RESULT or acquisition.places != ((*op.target, ANY_ITEM),):
        return
    for head in _heads(graph, op):
        if head not in known:
            continue
        loop = graph.ops[head]
        assert isinstance(loop, Next)
        one = replace(acquisition, places=(loop.target,), listed=frozenset())
        begun = [target for target, edge in graph.successors[head] if edge is Edge.BODY]
        followed = follow_from(graph, effects, one, site, known[head], begun, edges)
        ended = [graph.ops[node].at for node in followed.endings.released]
        if not followed.endings.unknown and _any_in_body(function, loop.at, ended):
            yield followed


def _heads(graph: Graph, op: Call) -> list[int]:
    """The one loop over what the call returns, if nothing else is done with that."""
    (source,) = [op.target]
    users = [(node, each) for node, each in enumerate(graph.ops) if source in uses(each)]
    match users:
        case [(_, Move(target=iterated, part=""))]:
            heads = [node for node, each in enumerate(graph.ops) if iterated in uses(each)]
            return heads if len(heads) == 1 and _goes_over(graph, heads[0]) else []
    return []


def _goes_over(graph: Graph, node: int) -> bool:
    loop = graph.ops[node]
    return isinstance(loop, Next) and not loop.counted and not loop.part


def _any_in_body(function: Function, target: ast.AST, places: list[ast.AST]) -> bool:
    """Of the loop with this target."""
    lines = [getattr(at, "lineno", 0) for at in places]
    return any(
        node.target is target and any(node.body[0].lineno <= line <= _last_line(node.body) for line in lines)
        for node in function.nodes
        if isinstance(node, ast.For | ast.AsyncFor)
    )


def _last_line(body: list[ast.stmt]) -> int:
    return body[-1].end_lineno or 0
