"""What is counted for a record that only some ways write: `self.store.ref(schema)`, then `if guide.schema ==
schema: return True`, and only below it `self.guides[rid] = guide._replace(schema=schema)`.

Whoever ends the records gives back once for each of them. On the way that writes none, nobody was told."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.follow import Followed
from auditor.flow.lease import Loss
from auditor.flow.operands import operands
from auditor.flow.trace import shortest_path
from auditor.ir.ops import Call, Op
from auditor.project.code.bindings import assigned_by, root_of
from auditor.project.code.modules import Function
from auditor.project.leases.unnoted import fills
from auditor.source.nodes import walk


def lines_left_out(function: Function, acquire: ast.Call, followed: Followed) -> set[int]:
    """Of returns that say no more than the others do, on ways that neither put anything into the object nor
    hand on what was counted."""
    counted = acquire.args[0] if len(acquire.args) == 1 and not acquire.keywords else None
    root = root_of(counted) if counted is not None else ""
    if counted is None or root in ("", function.owner) or not any(_records(function, acquire, counted)):
        return set()
    graph, roots = function.graph, {function.owner, *function.parameters}
    found = set()
    for loss, node, held in followed.endings.lost:
        out = graph.ops[node].at
        if loss is not Loss.RETURN or not isinstance(out, ast.Return) or _speaks_of(out, root):
            continue
        way = [graph.ops[station.node] for station in shortest_path(graph, followed.solution, node, held)]
        if not fills(way, roots) and not _hands_on(way, acquire, root):
            found.add(out.lineno)
    return found


def _records(function: Function, acquire: ast.Call, counted: ast.expr) -> Iterator[ast.stmt]:
    """Stores further down into a table of the object, or of what it was told, of a record around it."""
    text = ast.unparse(counted)
    for node in function.statements:
        for target, value in assigned_by(node) if node.lineno > acquire.lineno else ():
            of_others = isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute)
            if of_others and isinstance(value, ast.Call):
                given = [*value.args, *(keyword.value for keyword in value.keywords)]
                if any(
                    isinstance(n, ast.expr) and ast.unparse(n) == text for each in given for n in walk(each)
                ):
                    yield node


def _speaks_of(out: ast.Return, root: str) -> bool:
    """`return node`, whose lock the caller has then."""
    return out.value is not None and any(getattr(node, "id", "") == root for node in walk(out.value))


def _hands_on(way: Sequence[Op], acquire: ast.Call, root: str) -> bool:
    """Some other call on the way is given it."""
    return any(
        isinstance(op, Call)
        and op.at is not acquire
        and any(path[0] == root and position != -1 for position, path in operands(op))
        for op in way
    )
