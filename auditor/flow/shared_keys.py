"""Tables that a loop fills under what several things have in common: `held[len(branch)] = pool.take()`.

The second branch of that length takes the place of the first, unless somebody looks at what is there."""

import ast

from auditor.flow.operands import operands, uses
from auditor.flow.places import METADATA
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, Assume, Call, EndStatement, Op, Store

LOOKING = frozenset({"get", "pop", "setdefault", "keys", "__contains__"})


def stored_under_shared_keys(graph: Graph) -> frozenset[int]:
    """Nodes that put something into a table that no test and no look-up of this function is about."""
    stores = [(node, op) for node, op in enumerate(graph.ops) if isinstance(op, Store)]
    shared = [(node, op.target[0]) for node, op in stores if _is_shared(graph, _key(op.at))]
    return frozenset(node for node, table in shared if not _looked_at(graph, table))


def _key(at: ast.AST) -> ast.expr | None:
    match at:
        case ast.Subscript(slice=key) | ast.DictComp(key=key):
            return key
    return None


def _is_shared(graph: Graph, key: ast.expr | None) -> bool:
    match key:
        case ast.Name(id=name):
            values = [_given(op, name) for op in graph.ops]
            return any(value is not None and _is_shared(graph, value) for value in values)
        case ast.Attribute(attr=attribute):
            return f".{attribute}" in METADATA
        case ast.Call(func=ast.Name(id="len")) | ast.BinOp(op=ast.Mod()):
            return True
        case ast.Tuple(elts=parts):
            return all(_is_shared(graph, part) for part in parts)
    return False


def _given(op: object, name: str) -> ast.expr | None:
    match op:
        case EndStatement(at=ast.Assign(targets=[ast.Name(id=target)], value=value)) if target == name:
            return None if isinstance(value, ast.Name) else value
    return None


def _looked_at(graph: Graph, table: str) -> bool:
    """`if key in table`, `table.get(key)`, `free(table[key])`, `table[len(table)] = ...`."""
    return any(_looks_at(op, table) for op in graph.ops)


def _looks_at(op: Op, table: str) -> bool:
    if isinstance(op, Assume):
        return table in op.names
    if isinstance(op, Call):
        measured = op.method == "len" and op.args == (((table,), False),)
        if measured or (op.receiver == (table,) and op.method in LOOKING):
            return True
    used = (path for _, path in operands(op)) if isinstance(op, Call) else uses(op)
    return any(path == (table, ANY_ITEM) for path in used)
