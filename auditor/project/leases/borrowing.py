"""What the calls that have only borrowed one lease say of calls that got another one:

    left, right = arena.malloc(n), arena.malloc(n)       first.launch(stream)
    out = gpu.split_gemm(a, b, left, right)              stream = bank.checkout()
    arena.mfree(left)                                    second.launch(stream)
    return out                                           bank.checkin(stream)

The gemm has not kept the left half, and so not the right one; a launch keeps no stream."""

import ast
import re
from collections.abc import Set

from auditor.flow.operands import operands
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Move, Path
from auditor.project.meaning.borrowers import may_keep

_MAKING = re.compile(
    r"_*(?:[A-Z]|(?:make|build|create|wrap|new|open|pack|pair|join|bundle|start|begin|as|to)(?:_|$))"
)
"""Names of what may return an object that has what it was told."""


def alike_beside(graph: Graph, lent: Set[int]) -> Set[int]:
    """Calls of methods that are called as these are, of whomever."""
    methods = {op.method for node in lent if isinstance(op := graph.ops[node], Call) and op.receiver}
    return {
        node
        for node, op in enumerate(graph.ops)
        if isinstance(op, Call) and op.receiver and op.method in methods and not may_keep(op.at)
    }


def told_together(graph: Graph, lent: Set[int], one: int, other: int) -> bool:
    """Whether one of these calls was told what both calls of one function have returned."""
    first, second = graph.ops[one], graph.ops[other]
    if not (isinstance(first, Call) and isinstance(second, Call)) or one == other:
        return False
    if ast.unparse(first.at.func) != ast.unparse(second.at.func):
        return False
    for node in lent:
        call = graph.ops[node]
        if isinstance(call, Call) and not (_MAKING.match(call.method) or may_keep(call.at)):
            told = {path for _, path in operands(call)}
            if told & _names(graph, first) and told & _names(graph, second):
                return True
    return False


def _names(graph: Graph, call: Call) -> Set[Path]:
    return {
        call.target,
        *(op.target for op in graph.ops if isinstance(op, Move) and op.source == call.target),
    }
