"""Tables to which a class moves leases, and where nobody ends them: `self.parked[key] =
self.active.pop(key)`, and who aborts a session looks for it among the active ones."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assigned_by, given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import INITIAL

ABORTING = re.compile(r"_*(?:abort|cancel|kill|drop|remove|disconnect|close|evict|forget|delete)(?:_|$)")
"""Ends that may come for one that lies anywhere."""


def parked_in(family: Sequence[Function], attribute: str) -> Iterator[tuple[Function, ast.stmt, str]]:
    """The method, the statement, and the other table, to which entries of this one are moved."""
    for method in family:
        for node in method.statements:
            for target, value in assigned_by(node):
                other = _table(target, method) if isinstance(target, ast.Subscript) else None
                if other not in (None, attribute) and attribute in _taken_from(value, method):
                    assert other is not None
                    yield method, node, other


def lost_in(
    family: Sequence[Function], other: str, back: str, enders: Sequence[str]
) -> list[tuple[Function, ast.AST]]:
    """Where entries of the other table are thrown away. None where anybody does more than to move them back,
    or to ask whether they are there."""
    thrown: list[tuple[Function, ast.AST]] = []
    aborted = any(ABORTING.match(name.rpartition(".")[2]) for name in enders)
    for method in family:
        parents = {id(child): node for node in method.nodes for child in ast.iter_child_nodes(node)}
        for node in method.nodes:
            of_it = isinstance(node, ast.Attribute) and own_attribute(node, method.owner or "") == other
            if not of_it or method.name in INITIAL:
                continue
            match _use(node, parents, method, back):
                case "thrown":
                    thrown.append((method, node))
                case "other":
                    return []
    if thrown or not aborted:
        return thrown
    return [(method, node) for method, node, to in parked_in(family, back) if to == other]


def _use(node: ast.AST, parents: dict[int, ast.AST], method: Function, back: str) -> str:
    parent = parents.get(id(node))
    match parent:
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return "asked"
        case ast.Subscript(ctx=ast.Store()):
            return "filled"
        case ast.Subscript(ctx=ast.Del()):
            return "thrown"
        case ast.Attribute(attr="setdefault"):
            return "filled"
        case ast.Attribute(attr="get"):
            return "asked" if _is_tested(parents.get(id(parent)), parents) else "other"
        case ast.Attribute(attr="pop"):
            call = parents.get(id(parent))
            over = parents.get(id(call))
            if isinstance(over, ast.Expr):
                return "thrown"
            if isinstance(over, ast.Assign) and any(_table(to, method) == back for to in over.targets):
                return "back"
    return "other"


def _is_tested(call: ast.AST | None, parents: dict[int, ast.AST]) -> bool:
    return isinstance(parents.get(id(call)), ast.Compare | ast.If | ast.UnaryOp | ast.BoolOp)


def _table(target: ast.expr, method: Function) -> str | None:
    """`parked` of `self.parked[key]` and of `self.parked.setdefault(key, {})[name]`."""
    while True:
        match target:
            case (
                ast.Subscript(value=inner)
                | ast.Call(func=ast.Attribute(value=inner, attr="setdefault" | "get"))
            ):
                target = inner
            case _:
                return own_attribute(target, method.owner or "")


def _taken_from(value: ast.expr, method: Function) -> set[str]:
    """`active` of `self.active.pop(key)`, also by way of a local name."""
    values = list(given_to(method, value.id)) if isinstance(value, ast.Name) else [value]
    found = set()
    for each in values:
        match each:
            case ast.Call(func=ast.Attribute(value=table, attr="pop")):
                if (name := _table(table, method)) is not None:
                    found.add(name)
    return found
