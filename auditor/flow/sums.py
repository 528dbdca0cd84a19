"""Lists that are put together on the way into a call: `pool.free(request.pages + request.draft)`."""

import ast
from collections.abc import Iterable

from auditor.ir.ops import Fresh, Move, Op, Path

LISTED = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp)
"""What may be a list of the pool's; `first + 1` is a number."""


def sums(ops: Iterable[Op]) -> dict[Path, tuple[Path, ...]]:
    """From what was put together, under whatever name, to its parts."""
    found: dict[Path, tuple[Path, ...]] = {}
    for op in ops:
        match op:
            case Fresh(at=ast.BinOp(left=left, op=ast.Add(), right=right), target=target, uses=uses):
                if isinstance(left, LISTED) and isinstance(right, LISTED):
                    found[target] = tuple(part for use in uses for part in found.get(use, (use,)))
            case Move(source=source) if len(op.target) == 1 and source in found:
                found[op.target] = found[source]
    return found
