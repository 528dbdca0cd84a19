"""Numbers that a loop gives each to whom it finds: that there were as many takers is not for us to prove."""

import ast

from auditor.flow.follow import Followed
from auditor.flow.knowledge import FILLING
from auditor.flow.places import begins_with
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Leave, Next, Op, Store
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import loops_around


def dealt_out(function: Function, site: int, followed: Followed) -> list[int]:
    """Lines on which that happens. A loop over the numbers themselves meets each: what it passes over is
    left."""
    graph, endings = function.graph, followed.endings
    around = loops_around(function, graph.ops[site].at)
    given = (
        graph.ops[node] for node in endings.written.union(endings.stored, endings.taken, endings.unknown)
    )
    return [
        op.at.lineno
        for op in given
        if isinstance(op.at, (ast.expr, ast.stmt))
        and not isinstance(op, Leave)
        and (loops := loops_around(function, op.at) - around)
        and not (_keeps(op) and any(_goes_over(graph, head, followed) for head in loops))
    ]


def _keeps(op: Op) -> bool:
    """The thing itself, not what it holds."""
    return isinstance(op, Store) or (isinstance(op, Call) and op.method in FILLING)


def _goes_over(graph: Graph, head: int, followed: Followed) -> bool:
    """Whether what the loop yields is the lease."""
    loop = graph.ops[head]
    element = loop.element if isinstance(loop, Next) else None
    places = (place for held in followed.solution.states.get(head, ()) for place in held.places)
    return element is not None and any(begins_with(place, element) for place in places)
