"""One worklist solver: states at nodes, merged where equal, with what is known of conditions carried along.

This is property simulation (Das, Lerner, Seigle: ESP, PLDI 2002): states that hold the same lease in the
same places are merged and their knowledge intersected; different ones stay apart. So the cost is bounded by
the number of different ownership states, and branches that test the same condition still correlate."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Generic, TypeVar

from auditor.flow.knowledge import Knowledge, join, learn
from auditor.flow.limits import TooManyStates
from auditor.ir.graph import Graph
from auditor.ir.ops import Edge

State = TypeVar("State", bound=Hashable)

STATES_PER_NODE = 48
"""More different ownership states than this at one place: the lease is not followed, and said to be so."""


@dataclass(slots=True)
class Solution(Generic[State]):
    """`states[node]` before the node's operation; `came_from` holds every step for traces."""

    states: dict[int, dict[State, Knowledge]] = field(default_factory=dict)
    came_from: dict[tuple[int, State], list[tuple[int, State, Edge]]] = field(default_factory=dict)
    starts: set[tuple[int, State]] = field(default_factory=set)


Step = Callable[[int, State, Edge], Sequence[State]]
"""The states after a node's operation along one of its edges; none when the path or the lease ends there."""


def solve(
    graph: Graph,
    start: Iterable[tuple[int, State, Knowledge]],
    step: Step[State],
    edges: frozenset[Edge],
    told: Mapping[tuple[int, State], Knowledge] = MappingProxyType({}),
) -> Solution[State]:
    """Propagate from `start` along `edges` until nothing changes. Raises TooManyStates. `told` is what a
    state behind a node knows because it is that state; steps may add to it.

    A node waits for all that lead to it (reverse postorder), so that ways meet before they go on together."""
    solution: Solution[State] = Solution()
    ranks = graph.ranks()
    work: list[tuple[int, int]] = []
    waiting: dict[int, dict[State, None]] = {}

    def arrive(node: int, state: State, known: Knowledge) -> None:
        here = solution.states.setdefault(node, {})
        before = here.get(state)
        merged = known if before is None else join(before, known)
        if before is not None and merged == before:
            return
        if before is None and len(here) >= STATES_PER_NODE:
            raise TooManyStates
        here[state] = merged
        if node not in waiting:
            waiting[node] = {}
            heappush(work, (ranks[node], node))
        waiting[node][state] = None

    for node, state, known in start:
        solution.starts.add((node, state))
        arrive(node, state, known)
    while work:
        _, node = heappop(work)
        for state in waiting.pop(node):
            learned = learn(graph, graph.ops[node], solution.states[node][state])
            if learned is None:
                continue
            if not graph.successors[node]:
                step(node, state, Edge.NORMAL)  # the function is left here
            for target, edge in graph.successors[node]:
                if edge not in edges:
                    continue
                for after in step(node, state, edge):
                    more = told.get((node, after)) if told else None
                    origins = solution.came_from.setdefault((target, after), [])
                    if (node, state, edge) not in origins:
                        origins.append((node, state, edge))
                    arrive(target, after, learned | more if more else learned)
    return solution
