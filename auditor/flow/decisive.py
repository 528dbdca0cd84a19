"""Which branches on a path decide: one whose other way leads to the same end is not worth telling."""

from collections import deque
from collections.abc import Iterable, Sequence

from auditor.flow.solve import Solution
from auditor.flow.trace import Point, State, Station
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Assume, Edge


def decisive(
    graph: Graph, solution: Solution[State], path: Sequence[Station], ends: Iterable[Point[State]]
) -> list[Station]:
    """`path` without the branches whose other outcome also leads to one of `ends`, the states of one place.

    An exception counts as another way only where the path itself takes one: every call may raise."""
    leading = _leading_to(solution, ends, _allowed(path))
    other_ways = {
        (id(op.at), op.value)
        for node in leading
        if isinstance(op := graph.ops[node], Assume)
    }  # fmt: skip
    return [station for station in path if not _indifferent(graph, station, other_ways)]


def _indifferent(graph: Graph, station: Station, other_ways: set[tuple[int, bool]]) -> bool:
    op = graph.ops[station.node]
    return isinstance(op, Assume) and (id(op.at), not op.value) in other_ways


def _allowed(path: Sequence[Station]) -> frozenset[Edge]:
    taken = {station.edge for station in path}
    return frozenset(Edge) - (RAISING - taken)


def _leading_to(
    solution: Solution[State], ends: Iterable[Point[State]], allowed: frozenset[Edge]
) -> set[int]:
    """The nodes from which one of `ends` is reached."""
    met = set(ends)
    queue = deque(met)
    while queue:
        for earlier, state, edge in solution.came_from.get(queue.popleft(), ()):
            if edge in allowed and (earlier, state) not in met:
                met.add((earlier, state))
                queue.append((earlier, state))
    return {node for node, _ in met}
