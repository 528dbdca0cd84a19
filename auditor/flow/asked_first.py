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
    only_kept = {at for at, _ in keeping} - {at for at, _ in losing}
    found = set()
    for node in domain.trusting:
        agreed = _agreed(graph, node) | (_told_by_its_fields(graph, node) & only_kept)
        if agreed & {at for at, _ in keeping - losing} and not agreed & {at for at, _ in losing}:
            found.add(node)
    return frozenset(found)


def _agreed(graph: Graph, node: int) -> set[int]:
    """Where the function goes on because the call did not say no."""
    answers = _answers(graph, node)
    return {
        at
        for at, op in enumerate(graph.ops)
        if isinstance(op, Assume) and op.subject in answers and not op.says_absent
    }


def _told_by_its_fields(graph: Graph, node: int) -> set[int]:
    """`if out.filtered: return None`: one of the two ways is the good one, and the lease is kept there."""
    answers = _answers(graph, node)
    return {
        at
        for at, op in enumerate(graph.ops)
        if isinstance(op, Assume) and len(op.subject or ()) > 1 and (op.subject or ())[:1] in answers
    }


def _answers(graph: Graph, node: int) -> set[Path]:
    """Names of what the call answers."""
    call = graph.ops[node]
    answers: set[Path] = {call.target} if isinstance(call, Call) else set()
    for op in graph.ops if answers else ():
        if isinstance(op, Move | Await) and op.source in answers and len(op.target) == 1:
            answers.add(op.target)
    return answers


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
