"""What a local name stands for, where it has one meaning."""

from auditor.ir.graph import Graph
from auditor.ir.ops import Move, Path, is_temporary


def spelt(graph: Graph, path: Path) -> Path | None:
    """The path with a local's single meaning put in for it; None where it has several.

    A local that was bound to the result of a call stands for itself."""
    for _ in range(4):
        sources = {op.source for op in graph.ops if isinstance(op, Move) and op.target == path[:1]}
        if path[0] in graph.parameters or not sources:
            return None if is_temporary(path) else path
        if len(sources) > 1:
            return None
        source = sources.pop()
        if is_temporary(source) and not any(isinstance(op, Move) and op.target == source for op in graph.ops):
            return None if is_temporary(path) else path
        path = (*source, *path[1:])
    return None
