"""Other names that a function gives to the same object."""

import ast

from auditor.ir.ops import Move, Path, is_temporary
from auditor.project.code.modules import Function


def names_of_object(function: Function, path: Path, until: ast.AST | None = None) -> tuple[Path, ...]:
    """The path itself first, then the others. A number is called so from then on: `until` that."""
    last = getattr(until, "lineno", None)
    same = {path}
    for op in function.graph.ops:
        if last is not None and getattr(op.at, "lineno", 0) > last:
            continue
        if isinstance(op, Move) and not is_temporary(op.target) and not is_temporary(op.source):
            if op.source in same and len(op.target) == 1:
                same.add(op.target)
            elif op.target in same and len(op.source) == 1:
                same.add(op.source)
    return (path, *sorted(same - {path}))
