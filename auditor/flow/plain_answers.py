"""Values that lead nobody to a lease, whatever made them: `-> float`, `float(x) * slot`, `table[pages]`."""

import ast
import re
from collections.abc import Iterable

from auditor.ir.graph import Graph
from auditor.ir.ops import Move, Op, Path

PLAIN = re.compile(r"(?:Optional\[)?(?:float|bool)\b\]?(?: \| None)?")
"""Annotations of what is no number of a place, and no object that could have one."""


def answers_plainly(graph: Graph) -> bool:
    """Whether the function says of itself that a measure or a truth is all that it returns."""
    returns = getattr(graph.ops[0].at, "returns", None)
    return returns is not None and PLAIN.fullmatch(ast.unparse(returns).strip("'\"")) is not None


def is_measured(op: Op) -> bool:
    """`float(x.sum()) * slot`: a measure that was scaled, and no place of anything."""
    sides = (op.at.left, op.at.right) if isinstance(op.at, ast.BinOp) else ()
    return any(isinstance(side, ast.Call) and getattr(side.func, "id", "") == "float" for side in sides)


def names_of(graph: Graph, places: Iterable[Path]) -> frozenset[Path]:
    """What is at these places goes by these names, whole."""
    found = set(places)
    for op in graph.ops:
        if isinstance(op, Move) and op.source in found:
            found.add(op.target)
    return frozenset(found)
