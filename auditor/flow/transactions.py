"""Connections whose `with` ends a transaction and leaves them open."""

from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Move, Path

COMMITTING = frozenset({"sqlite3.connect"})
CLOSING = frozenset({"closing", "aclosing"})


def stays_open(graph: Graph, acquire: str, context: Path) -> bool:
    """Whether what `acquire` returned is entered by itself, and not through `closing`."""
    if acquire not in COMMITTING:
        return False
    names = {context} | {op.source for op in graph.ops if isinstance(op, Move) and op.target == context}
    return not any(isinstance(op, Call) and op.method in CLOSING and op.target in names for op in graph.ops)
