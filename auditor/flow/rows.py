"""Leases that are rows of plain numbers, a bytearray or a list of floats: what is taken out of one, or made
of it, is a copy, and no way back to the pool."""

from collections.abc import Set

from auditor.flow.plain_answers import names_of
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Path

COPYING = frozenset({"list", "tuple", "set", "frozenset", "sorted", "reversed", "deque", "filter", "islice",
                     "nlargest", "nsmallest", "copy", "deepcopy", "zip", "enumerate", "map", "chain", "dict",
                     "sum", "extend", "extendleft", "array", "bytes", "bytearray"})  # fmt: skip
"""What makes something of the numbers in a row, whichever they are, or puts them elsewhere."""

VIEWING = frozenset({"memoryview", "frombuffer", "from_buffer", "asarray", "cast", "toreadonly"})
"""What shows the same memory: a slice of that shows it as well."""


def views(graph: Graph) -> frozenset[Path]:
    """Names of what shows the memory of something else."""
    return names_of(graph, [op.target for op in graph.ops if isinstance(op, Call) and op.method in VIEWING])


def out_of_a_row(operand: Path, rows: Set[Path]) -> bool:
    """`row[0]`, `row[:n]`, and one after the other."""
    return any(piece.startswith("[") and operand[:at] in rows for at, piece in enumerate(operand) if at)


def is_copied_out(call: Call, operand: Path, rows: Set[Path]) -> bool:
    """`list(row)`, `row.copy()`, `total.extend(row[:n])`"""
    return out_of_a_row(operand, rows) or (operand in rows and call.method in COPYING)
