"""Results of calls which a function only measures: `out = self.model(buffer)`, and `float(out.sum())`.

Where it gives the buffer back while it has such a result, that is another thing, or another name that nobody
takes anywhere: on no way does it keep the buffer."""

import ast
from collections.abc import Iterator

from auditor.flow.held import Endings
from auditor.flow.operands import uses
from auditor.ir.graph import Graph
from auditor.ir.ops import Assume, Call, Move, Op, is_temporary

REDUCING = frozenset({"sum", "mean", "norm", "std", "var", "item", "numel"})
"""Methods whose result is a number, or another tensor."""

ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

SAYING = frozenset({"float", "bool", "len", "print"})
"""Functions whose result is no place of anything."""


def only_measured(graph: Graph, endings: Endings) -> frozenset[str]:
    """Names of what may be the lease where that is given back."""
    perhaps = {place[0] for held in endings.released.values() for place in held.maybe if len(place) == 1}
    named = {name for name in perhaps if not is_temporary((name,)) and _is_of_a_call(graph, name)}
    return frozenset(name for name in named if not any(_goes_on(op, name) for op in graph.ops))


def ranked(graph: Graph) -> frozenset[str]:
    """`score` and `top` of `score = self.step(lane)` and `if score > top:`, which are numbers."""
    names: set[str] = set()
    for op in graph.ops:
        match op:
            case Assume(at=ast.Compare(left=ast.Name(id=one), ops=[asked], comparators=[ast.Name(id=other)])):
                names |= {one, other} if isinstance(asked, ORDERING) else set()
    scores = {name for name in names if _is_of_a_call(graph, name)}
    return frozenset(scores | {name for name in names if _takes_over(graph, name, scores)})


def _takes_over(graph: Graph, name: str, scores: set[str]) -> bool:
    """`top = score`"""
    given = {op.source for op in graph.ops if isinstance(op, Move) and op.target == (name,)}
    return any(len(source) == 1 and source[0] in scores for source in given)


def _is_of_a_call(graph: Graph, name: str) -> bool:
    """Of calls alone, whose results go by no other name."""
    made = [op for op in graph.ops if name in _bound(op)]
    results = {op.target for op in graph.ops if isinstance(op, Call)}
    return bool(made) and all(isinstance(op, Move) and op.source in results for op in made)


def _bound(op: Op) -> Iterator[str]:
    targets = [getattr(op, "target", None), *(to for _, to in getattr(op, "targets", ()))]
    return (target[0] for target in targets if target is not None and len(target) == 1)


def _goes_on(op: Op, name: str) -> bool:
    """It does more than to measure it."""
    if isinstance(op, Assume):
        return name in op.names
    if not any(path[0] == name for path in uses(op)):
        return False
    if not isinstance(op, Call):
        return True
    measured = op.receiver == (name,) and op.method in REDUCING and not (op.args or op.kwargs)
    return not (measured or (op.method in SAYING and op.receiver is None))
