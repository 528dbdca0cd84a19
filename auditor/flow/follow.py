"""Follow one lease through one function, and say how it ended."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from auditor.flow.asked_first import asked_first
from auditor.flow.effects import Acquisition, Effects, Handle
from auditor.flow.held import Endings, Held
from auditor.flow.kept_beside import kept_beside
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.flow.measured_by import measured_by
from auditor.flow.measured_only import only_measured, ranked
from auditor.flow.only_told import only_told
from auditor.flow.operands import operands
from auditor.flow.ownership import Ownership
from auditor.flow.places import GIVEN, named
from auditor.flow.says_it_took import says_it_took
from auditor.flow.solve import Solution, solve
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, RESULT, Call, Capture, Edge, Move, Next, Path, Unpack, is_temporary
from auditor.source.nodes import walk

ENTRY = 0
EDGES = {
    "none": frozenset(Edge) - RAISING,
    "explicit": frozenset(Edge),
    "calls": frozenset(Edge),
}
"""Which edges count, by the setting `exceptions`. A handler that somebody wrote expects its exception, so
under `explicit` calls still reach handlers; what leaves the function by a call's exception is left out
afterwards."""


OWN_NAMES = frozenset({"self", "cls"})


@dataclass(frozen=True, slots=True)
class Shown:
    """`lent` are the calls of unknown functions that turned out to have borrowed the lease, `others` names of
    what they returned, which is another thing."""

    lent: frozenset[int] = frozenset()
    others: frozenset[str] = frozenset()


UNSEEN = Shown()


@dataclass(slots=True)
class Followed:
    """`shown` is what became clear of calls on the way."""

    endings: Endings
    solution: Solution[Held]
    shown: Shown

    @property
    def only_yielded(self) -> bool:
        """By a generator that does not see to it afterwards; it may give back what it does not yield."""
        endings, states = self.endings, self.solution.states
        others = endings.returned or endings.stored or endings.written or endings.unknown
        ended = (held for node in endings.released for held in states.get(node, ()))
        return bool(endings.yielded) and not others and not any(held.lent for held in ended)


def known_at_nodes(graph: Graph) -> dict[int, Knowledge]:
    """What is known of conditions at each node that can be reached, whatever leases exist."""
    solution = solve(graph, [(ENTRY, 0, NOTHING)], lambda node, state, edge: (state,), EDGES["calls"])
    return {node: states[0] for node, states in solution.states.items()}


def starting(acquisition: Acquisition) -> Held:
    places = acquisition.listed.union(acquisition.places)
    return Held(places, kept=named(places))


def _looped_over(graph: Graph, heads: frozenset[int]) -> frozenset[Path]:
    """What loops go over, as far as it has a name: in their bodies it is known to have an element."""
    loops = (graph.ops[head] for head in heads)
    return frozenset(op.source for op in loops if isinstance(op, Next) and not is_temporary(op.source))


def _marked_in_turns(graph: Graph, acquisition: Acquisition, heads: frozenset[int]) -> frozenset[Path]:
    """`for key in keys: cache.pin(key)`: what was marked in former turns is among the keys, and owed there.
    What lies in a field is still known to the other methods."""
    if not acquisition.keyed or acquisition.handle is not Handle.ARGUMENT:
        return frozenset()
    loops = (graph.ops[head] for head in heads)
    return frozenset(
        (*op.element, *place[len(op.target) :])
        for op in loops
        if isinstance(op, Next) and op.element is not None and not is_temporary(op.source)
        for place in acquisition.places
        if op.source[0] not in OWN_NAMES and op.source[0][0] != "@" and place[: len(op.target)] == op.target
    )


def follow_acquire(
    graph: Graph,
    effects: Effects,
    acquisition: Acquisition,
    site: int,
    known: Knowledge,
    edges: frozenset[Edge],
    lends: bool,
    loops: frozenset[int] = frozenset(),
    shown: Shown = UNSEEN,
) -> Followed:
    """From an acquire call on, inside loops with these heads, with what others have shown. Raises
    `solve.TooManyStates`."""
    acquisition = replace(acquisition, listed=_marked_in_turns(graph, acquisition, loops))
    keyed = acquisition.handle is Handle.ARGUMENT
    noted = _looped_over(graph, loops) | (measured_by(graph, site) if keyed else frozenset())
    held = replace(starting(acquisition), seen=loops, noted=noted)
    start = [(target, held, known) for target, edge in graph.successors[site] if edge is Edge.NORMAL]
    return _follow(graph, effects, acquisition, site, lends, start, edges, shown)


def follow_from(
    graph: Graph,
    effects: Effects,
    acquisition: Acquisition,
    site: int,
    known: Knowledge,
    nodes: list[int],
    edges: frozenset[Edge],
) -> Followed:
    """From these nodes on, where the places of the acquisition have it in each turn of a loop."""
    start = [(node, starting(acquisition), known) for node in nodes]
    return _follow(graph, effects, acquisition, site, False, start, edges)


def follow_given(
    graph: Graph,
    effects: Effects,
    acquisition: Acquisition,
    known: Knowledge,
    edges: frozenset[Edge],
    shown: Shown = UNSEEN,
) -> Followed:
    """A lease that the caller holds, from the function's entry on: what does the function do with it?"""
    held = starting(acquisition)
    if _is_rebound(graph, acquisition.places):
        held = replace(held, places=held.places | {GIVEN})
    return _follow(graph, effects, acquisition, -1, False, [(ENTRY, held, known)], edges, shown)


def _is_rebound(graph: Graph, places: tuple[Path, ...]) -> bool:
    """`while node.parent: node = node.parent`: the caller still has the one that he gave."""
    targets = (op.target for op in graph.ops if isinstance(op, Move))
    return len(places) == len(places[0]) == 1 and places[0] in targets


def _follow(
    graph: Graph,
    effects: Effects,
    acquisition: Acquisition,
    site: int,
    lends: bool,
    start: list[tuple[int, Held, Knowledge]],
    edges: frozenset[Edge],
    shown: Shown = UNSEEN,
) -> Followed:
    def followed(
        trusted: frozenset[int], others: frozenset[str], believing: bool = False
    ) -> tuple[Ownership, Solution[Held]]:
        domain = Ownership(graph, effects, acquisition, site, lends, trusted, others)
        domain.believing = believing
        return domain, solve(graph, start, domain.step, edges, domain.told)

    domain, solution = followed(shown.lent, others := shown.others)
    if doubtful(graph, domain.endings):
        back = frozenset(Edge) if site >= 0 else EDGES["none"]  # who undoes a failure may have kept it before
        believed = followed(_all_calls(graph), others, believing=True)
        trusted = _only_lent(*believed, back) | asked_first(graph, *believed) | only_told(*believed)
        trusted |= _of_the_same(graph, trusted, believed[0])
        trusted = frozenset(
            node for node in trusted if not says_it_took(graph, node, believed[0].endings.released.keys())
        )
        if trusted:
            others |= kept_beside(*believed)
            domain, solution = followed(trusted | shown.lent, others)
    others |= _gone_on_with(graph, domain.endings) | only_measured(graph, domain.endings)
    others |= ranked(graph) if domain.endings.unknown else frozenset()
    if others != domain.others and domain.endings.unknown:
        domain, solution = followed(domain.trusted, others)
    return Followed(domain.endings, solution, Shown(frozenset(domain.trusting), others))


def doubtful(graph: Graph, endings: Endings) -> frozenset[int]:
    """Calls of which it cannot be told what they did to the lease."""
    return frozenset(node for node in endings.unknown if isinstance(graph.ops[node], Call))


def _all_calls(graph: Graph) -> frozenset[int]:
    return frozenset(node for node, op in enumerate(graph.ops) if isinstance(op, Call))


def _only_lent(domain: Ownership, solution: Solution[Held], edges: frozenset[Edge]) -> frozenset[int]:
    """Calls of unknown functions that were only lent the lease: afterwards, along such edges, this function
    gives it back, returns it or hands it on. What was lent on one way was lent on the others."""
    endings = domain.endings
    pending = [
        (node, held)
        for node, first in endings.released.items()
        for held in (first, *solution.states.get(node, ()))
        if held.places == first.places  # however it came there, it is given back
    ]
    handed_on = (*endings.returned, *sorted(endings.taken))
    pending += [(node, held) for node in handed_on for held in solution.states.get(node, ())]
    seen = set(pending)
    while pending:
        for node, held, edge in solution.came_from.get(pending.pop(), ()):
            if edge in edges and (node, held) not in seen:
                seen.add((node, held))
                pending.append((node, held))
    return frozenset(domain.trusting & {node for node, _ in seen})


def _of_the_same(graph: Graph, trusted: frozenset[int], domain: Ownership) -> frozenset[int]:
    """`load(slot)` on one way, where another one goes on with `load(slot)` and `pool.put(slot)`, here or in
    a function that is called later."""
    calls = {node: op.at for node in domain.trusting if isinstance(op := graph.ops[node], Call)}
    lent = {ast.unparse(at.func) for node, at in calls.items() if node in trusted}
    if domain.endings.later:
        nested = (op.at for op in graph.ops if isinstance(op, Capture))
        lent |= {ast.unparse(each.func) for at in nested for each in walk(at) if isinstance(each, ast.Call)}
    return frozenset(node for node, at in calls.items() if ast.unparse(at.func) in lent)


def _gone_on_with(graph: Graph, endings: Endings) -> frozenset[str]:
    """`y = self.layer(buffer); pool.free(buffer); return y`: who wrote that knows that y is no buffer, so it
    is none on the ways that return y without `free` either; nor is the y of `y = self.wide(buffer)` there."""
    perhaps = {(node, place[0]) for node, held in endings.released.items() for place in held.maybe}
    perhaps |= {(node, name) for node, held in endings.released.items() for name in _made_of(graph, held)}
    return frozenset(name for node, name in sorted(perhaps) if _returned_after(graph, node, name))


def _made_of(graph: Graph, held: Held) -> Iterator[str]:
    """Names of what calls have returned that were told it."""
    told = (
        op for op in graph.ops if isinstance(op, Call) and any(at in held.places for _, at in operands(op))
    )
    made = {op.target for op in told}
    return (op.target[0] for op in graph.ops if isinstance(op, Move) and op.source in made)


def _returned_after(graph: Graph, node: int, name: str) -> bool:
    """Whether what the name means at this node is returned later on."""
    pending, seen = [node], {node}
    while pending:
        for following, edge in graph.successors[pending.pop()]:
            op = graph.ops[following]
            if edge in RAISING or following in seen:
                continue
            if isinstance(op, Move) and op.target == RESULT and op.source == (name,):
                return True
            unpacked = (target for _, target in op.targets) if isinstance(op, Unpack) else ()
            if (name,) not in (getattr(op, "target", None), *unpacked):
                seen.add(following)
                pending.append(following)
    return False
