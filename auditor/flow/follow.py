"""Follow one lease through one function, and say how it ended."""

from dataclasses import dataclass, replace

from auditor.flow.effects import Acquisition, Effects
from auditor.flow.held import Endings, Held
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.flow.ownership import Ownership
from auditor.flow.places import named
from auditor.flow.solve import Solution, solve
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Edge, Next, Path, is_temporary

ENTRY = 0
EDGES = {
    "none": frozenset(Edge) - RAISING,
    "explicit": frozenset(Edge),
    "calls": frozenset(Edge),
}
"""Which edges count, by the setting `exceptions`. A handler that somebody wrote expects its exception, so
under `explicit` calls still reach handlers; what leaves the function by a call's exception is left out
afterwards."""


@dataclass(slots=True)
class Followed:
    endings: Endings
    solution: Solution[Held]


def known_at_nodes(graph: Graph) -> dict[int, Knowledge]:
    """What is known of conditions at each node that can be reached, whatever leases exist."""
    solution = solve(graph, [(ENTRY, 0, NOTHING)], lambda node, state, edge: (state,), EDGES["calls"])
    return {node: states[0] for node, states in solution.states.items()}


def starting(acquisition: Acquisition) -> Held:
    places = frozenset(acquisition.places)
    return Held(places, kept=named(places))


def _looped_over(graph: Graph, heads: frozenset[int]) -> frozenset[Path]:
    """What loops go over, as far as it has a name: in their bodies it is known to have an element."""
    loops = (graph.ops[head] for head in heads)
    return frozenset(op.source for op in loops if isinstance(op, Next) and not is_temporary(op.source))


def follow_acquire(
    graph: Graph,
    effects: Effects,
    acquisition: Acquisition,
    site: int,
    known: Knowledge,
    edges: frozenset[Edge],
    lends: bool,
    loops: frozenset[int] = frozenset(),
) -> Followed:
    """From an acquire call on, inside loops with these heads. Raises `solve.TooManyStates`."""
    domain = Ownership(graph, effects, acquisition, site, lends)
    held = replace(starting(acquisition), seen=loops, noted=_looped_over(graph, loops))
    start = [(target, held, known) for target, edge in graph.successors[site] if edge is Edge.NORMAL]
    return Followed(domain.endings, solve(graph, start, domain.step, edges))


def follow_given(
    graph: Graph, effects: Effects, acquisition: Acquisition, known: Knowledge, edges: frozenset[Edge]
) -> Followed:
    """A lease that the caller holds, from the function's entry on: what does the function do with it?"""
    domain = Ownership(graph, effects, acquisition, -1, False)
    start = [(ENTRY, starting(acquisition), known)]
    return Followed(domain.endings, solve(graph, start, domain.step, edges))
