"""Unknown functions that are asked whether they can, of a lease that is kept only where they say so.

`if not self.notify(extent): return None`, and `self.sent[key] = extent` further on: who keeps it behind the
call had only lent it, and where the answer is no it is nobody's."""

from collections.abc import Iterable

from auditor.flow.held import Held
from auditor.flow.lease import EXCEPTIONAL
from auditor.flow.ownership import Ownership
from auditor.flow.solve import Solution
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Assume, Await, Call, Leave, Move, Path

Point = tuple[int, Held]


def asked_first(graph: Graph, domain: Ownership, solution: Solution[Held]) -> frozenset[int]:
    """Such calls, by a lease that was followed with all calls believed: behind a yes it is kept on every way
    out."""
    endings = domain.endings
    ends = {*endings.stored, *(node for node, op in enumerate(graph.ops) if isinstance(op, Leave))}
    at_ends = [(node, held) for node in ends for held in solution.states.get(node, ())]
    kept = [(node, held) for node, held in at_ends if node in endings.stored or domain.kept_outside(held)]
    if not kept:
        return frozenset()
    keeping = leading_to(solution, kept)
    losing = leading_to(solution, ((at, held) for loss, at, held in endings.lost if loss not in EXCEPTIONAL))
    found = set()
    for node in domain.trusting:
        agreed = _agreed(graph, node)
        if agreed & {at for at, _ in keeping - losing} and not agreed & {at for at, _ in losing}:
            found.add(node)
    return frozenset(found)


def _agreed(graph: Graph, node: int) -> set[int]:
    """Where the function goes on because the call did not say no."""
    call = graph.ops[node]
    if not isinstance(call, Call):
        return set()
    answers: set[Path] = {call.target}
    for op in graph.ops:
        if isinstance(op, Move | Await) and op.source in answers and len(op.target) == 1:
            answers.add(op.target)
    return {
        at
        for at, op in enumerate(graph.ops)
        if isinstance(op, Assume) and op.subject in answers and not op.says_absent
    }


def leading_to(solution: Solution[Held], points: Iterable[Point]) -> set[Point]:
    """States on ordinary ways there."""
    seen = set(points)
    pending = list(seen)
    while pending:
        for node, held, edge in solution.came_from.get(pending.pop(), ()):
            if edge not in RAISING and (node, held) not in seen:
                seen.add((node, held))
                pending.append((node, held))
    return seen
