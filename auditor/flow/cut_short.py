"""`return best[:width]`, `best = best[:width]`: what of a list made here lies behind the cut is nobody's."""

import ast

from auditor.flow.held import Held
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, RESULT, Assume, Call, Move, Next, Op

COUNTING = frozenset({"range", "islice", "arange", "zip", "len", "min", "repeat"})


def cuts_short(graph: Graph, node: int, held: Held) -> bool:
    """Of a list that nothing else has, as long as nobody has asked how long it is, or made it that long."""
    op = graph.ops[node]
    if not isinstance(op, Move) or op.source[-1] != "[:]" or len(op.source) != 2:
        return False
    whole = (op.source[0], ANY_ITEM)
    if not held.places or any(place[:2] != whole for place in held.places):
        return False
    ends = [graph.ops[target].at for target, _ in graph.successors[node]]
    bound = next(filter(None, (_upper_bound(at, op.source[0]) for at in (op.at, *ends))), None)
    return (
        op.target in (RESULT, op.source[:1])
        and bound is not None
        and not any(_tells_the_length(other, op.source[0], bound) for other in graph.ops)
    )


def _upper_bound(at: ast.AST, name: str) -> ast.expr | None:
    match getattr(at, "value", None):
        case ast.Subscript(
            value=ast.Name(id=named), slice=ast.Slice(lower=None, upper=ast.expr() as upper, step=None)
        ):
            plain = named == name and not any(isinstance(inner, ast.Call) for inner in ast.walk(upper))
            return upper if plain else None
    return None


def _tells_the_length(op: Op, name: str, bound: ast.expr) -> bool:
    match op:
        case Assume(names=names):
            return {"len", name} <= names
        case Next(part=part):
            return part != "" and ast.unparse(bound) in part
        case Call(method=method, at=at) if method in COUNTING:
            asked = (inner for argument in at.args for inner in ast.walk(argument))
            written = ast.dump(bound)
            return any(getattr(inner, "id", None) == name or ast.dump(inner) == written for inner in asked)
    return False
