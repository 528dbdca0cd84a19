"""What a function's result says of what it did with a lease: `return False` where it did nothing."""

import ast
from collections.abc import Iterable

from auditor.flow.held import Held
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.flow.solve import Solution
from auditor.ir.graph import Graph
from auditor.ir.ops import RESULT, Assume, Await, Call, Leave, Move, Way


def said_by(graph: Graph, solution: Solution[Held], left: Iterable[tuple[int, Held]]) -> Knowledge:
    """What is known of the result, without its name, wherever the lease is left as it was."""
    said = [said_at(graph, node, solution.states[node].get(held, NOTHING)) for node, held in left]
    return frozenset.intersection(*said) if said else NOTHING


def tells_apart(
    graph: Graph, solution: Solution[Held], said: Knowledge, left: Iterable[tuple[int, Held]], ended: bool
) -> bool:
    """Whether all other ways out return something of which the opposite is known; `ended`: some of them are
    left without the lease."""
    unchanged = set(left)
    others = []
    for node, op in enumerate(graph.ops):
        if isinstance(op, Leave) and op.way is not Way.RAISE:
            here = solution.states.get(node, {})
            others += [said_at(graph, node, here[held]) for held in here if (node, held) not in unchanged]
            if ended and (not here or not isinstance(getattr(op.at, "value", None), ast.Constant)):
                others.append(said_at(graph, node, NOTHING))
    return bool(others) and any(all((key, not truth) in other for other in others) for key, truth in said)


def asked_of(graph: Graph, call: Call) -> bool:
    """Whether the function decides by what the call returned."""
    names = {call.target[0]}
    for op in graph.ops:
        if isinstance(op, Move | Await) and op.source[0] in names and len(op.source) == 1:
            names.add(op.target[0])
    asked = (op for op in graph.ops if isinstance(op, Assume))
    return any(not names.isdisjoint(op.names) or (op.subject or ("",))[0] in names for op in asked)


def said_at(graph: Graph, node: int, known: Knowledge) -> Knowledge:
    op = graph.ops[node]
    if not isinstance(op, Leave):
        return NOTHING  # put where it stays before the function is left
    value = op.at.value if isinstance(op.at, ast.Return) else None
    if op.way is Way.FALL_THROUGH or value is None:
        return frozenset({("", False), (" is None", True)})
    if isinstance(value, ast.Constant):
        return frozenset({("", bool(value.value)), (" is None", value.value is None)})
    name = value.id if isinstance(value, ast.Name) else RESULT[0]
    return frozenset((key[len(name) :], truth) for key, truth in known if key in (name, f"{name} is None"))
