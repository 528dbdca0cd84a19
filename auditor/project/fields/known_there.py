"""Fields of which a method has made sure that something is in them, and which it fills all the same."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.ir.ops import Store
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import Filling, before, same
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def replaced_knowingly(filling: Filling, ending: Set[str], family: Sequence[Function]) -> bool:
    """`if self.lane is None: return`, and then `self.lane = park.assign()`: the first is in nobody's hands,
    where it was only worked with in between. Of a table, `if name in self.lanes:` around it."""
    if filling.key is not None:
        if not _is_under_it(filling):
            return False
    elif not _is_there(filling):
        return False
    place = ast.unparse(filling.target)
    return not any(_may_end_or_keep(node, place, ending, filling, family) for node in before(filling))


def _is_there(filling: Filling) -> bool:
    """On every way to the store."""
    graph = filling.method.graph
    nodes = [at for at, op in enumerate(graph.ops) if isinstance(op, Store) and op.at is filling.target]
    known = known_at_nodes(graph) if nodes else {}
    fact = (f"{filling.owner}.{filling.field} is None", False)
    return bool(nodes) and all(fact in known[at] for at in nodes if at in known)


def _is_under_it(filling: Filling) -> bool:
    """On every way to the store, and nobody looks at what is there."""
    tests = [
        node.test
        for node in filling.method.statements
        if isinstance(node, ast.If)
        and any(each is filling.statement for part in node.body for each in walk(part))
    ]
    if not any(_asks_for_key(test, filling) for test in tests):
        return False
    asked = {id(each) for test in tests for each in walk(test)}
    return not any(
        isinstance(node, ast.Attribute) and node.attr == filling.field
        for node in before(filling)
        if id(node) not in asked
    )


def _asks_for_key(test: ast.expr, filling: Filling) -> bool:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return any(_asks_for_key(value, filling) for value in values)
        case ast.Compare(left=key, ops=[ast.In()], comparators=[table]):
            of_table = own_attribute(table, filling.owner) == filling.field
            return of_table and filling.key is not None and same(key, filling.key)
    return False


def _may_end_or_keep(
    node: ast.AST, place: str, ending: Set[str], filling: Filling, family: Sequence[Function]
) -> bool:
    match node:
        case (
            ast.Assign(value=value)
            | ast.AnnAssign(value=ast.expr() as value)
            | ast.Return(value=ast.expr() as value)
        ):
            return any(ast.unparse(each) == place for each in _parts(value))
        case ast.Call(func=func):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            told = any(ast.unparse(each) in (place, filling.owner) for each in given)
            own = isinstance(func, ast.Attribute) and ast.unparse(func.value) == place
            if (told or own) and (last_name(node) in ending or looks_releasing(node)):
                return True
            if any(ast.unparse(each) == filling.owner for each in given):
                return True
            helper = own_attribute(func, filling.method.owner or "")
            return any(each.name == helper and f".{filling.field}" in each.text for each in family)
    return False


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """`old` and `other` of `(old, other)`, the only thing of another expression."""
    if isinstance(value, (ast.Tuple, ast.List)):
        yield from value.elts
    else:
        yield value
