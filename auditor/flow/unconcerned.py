"""Operations that have nothing to do with a lease, told apart by names alone.

Four of five steps of an analysis are such: the lease goes through them as it is, and nothing else needs to
be asked of them. What may concern a lease without naming anything that holds it (calls, conditions,
loops, ends of `with`, the ways out) is never among them."""

from auditor.flow.held import Held
from auditor.flow.knowledge import INTERMEDIATE
from auditor.flow.operands import uses
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    Constant,
    Define,
    Delete,
    EndStatement,
    Enter,
    Fresh,
    Havoc,
    InPlace,
    Lookup,
    Make,
    Move,
    Nop,
    Op,
    Path,
    Store,
    is_temporary,
)

WRITTEN_OUT = "<"
"""Begins the place of a lease that is an amount or a text: whatever is written alike stands for it."""


def spoken_of(graph: Graph) -> list[frozenset[str] | None]:
    """By node, the roots of the paths that it reads or writes; None where it may concern any lease."""
    if not graph.spoken:
        graph.spoken = [_spoken_of(op) for op in graph.ops]
    return graph.spoken


def _spoken_of(op: Op) -> frozenset[str] | None:
    match op:
        case Nop() | Define() | Havoc():
            return frozenset()
        case EndStatement():
            return frozenset({INTERMEDIATE})  # all that ends with its statement
        case Lookup(target=target, index=index):
            return frozenset({target[0], index[0]})
        case Store(target=target, source=source, key=key):
            return frozenset({target[0], source[0], *key[:1]})
        case Constant() | Fresh():
            return frozenset({WRITTEN_OUT, op.target[0], *(path[0] for path in uses(op))})
        case Move() | Make() | Enter() | InPlace() | Delete():
            return frozenset({op.target[0], *(path[0] for path in uses(op))})
    return None


def roots_of(held: Held, acquired: tuple[Path, ...]) -> frozenset[str]:
    """Of all places that are asked about the lease, those where it was `acquired` too."""
    paths = [*held.places, *held.maybe, *held.noted, *acquired]
    roots = {path[0] for path in paths}
    if any(root.startswith(WRITTEN_OUT) for root in roots):
        roots.add(WRITTEN_OUT)
    if any(is_temporary(path) for path in paths):
        roots.add(INTERMEDIATE)
    return frozenset(roots)
