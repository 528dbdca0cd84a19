"""Tables that a loop fills with what a pool lends to everybody who asks, under a key of the thing's own:

    for picture in pictures:
        entry = cache.hold(picture)
        held[entry.key] = entry

Where two pictures are alike, the second hold takes the place of the first, and one of them is forgotten."""

import ast

from auditor.flow.shared_keys import LOOKING
from auditor.ir.graph import Graph
from auditor.ir.ops import Assume, Call, Op, Path, Store


def stored_under_its_own_key(graph: Graph) -> frozenset[int]:
    """Nodes that do so, where nothing asks before whether there is one."""
    return frozenset(
        node
        for node, op in enumerate(graph.ops)
        if isinstance(op, Store) and _is_by_its_own(op) and not _is_looked_for(graph, op.target[:-1])
    )


def _is_by_its_own(store: Store) -> bool:
    """`held[entry.key]`, to which `entry` is stored."""
    match store.at:
        case ast.Subscript(slice=ast.Attribute(value=ast.Name(id=name))):
            return store.source[:1] == (name,) and len(store.source) == 1
    return False


def _is_looked_for(graph: Graph, table: Path) -> bool:
    return any(_looks_for_one(op, table) for op in graph.ops)


def _looks_for_one(op: Op, table: Path) -> bool:
    if isinstance(op, Assume):
        return table[0] in op.names and isinstance(op.at, ast.Compare | ast.UnaryOp)
    return isinstance(op, Call) and op.receiver == table and op.method in LOOKING
