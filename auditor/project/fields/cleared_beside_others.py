"""Ends of an object that give back what lies in some of its tables, and only empty another one:
`for row in self.rows.values(): self.pool.give(row)`, `self.rows.clear()`, `self.spare.clear()`."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assigned_by, assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

EMPTY = frozenset({"{}", "[]", "dict()", "list()", "set()", "deque()", "OrderedDict()"})
RENEWING = frozenset({"clear", "reset", "reset_state", "reset_all", "__init__"})
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)


def clears_beside_others(method: Function, attribute: str, ends: Set[str], told: str = "") -> bool:
    """All that it gives back, and there is some, comes out of other fields; and it starts no pool anew.
    `told` is whose fields they are, if not its own object's."""
    own = told or method.owner or ""
    if not any(empties(node, own, attribute) for node in method.statements):
        return False
    sources: list[set[str]] = []
    for call in method.calls:
        if _clears_a_table(call, method):
            continue
        if looks_releasing(call) or last_name(call) in ends | RENEWING:
            sources += [set(_fields_behind(end, by, own)) for end, by in _ends_meant(call, method, ends)]
    return bool(sources) and all(fields and attribute not in fields for fields in sources)


def _ends_meant(call: ast.Call, method: Function, ends: Set[str]) -> Iterator[tuple[ast.Call, Function]]:
    """`self.release_rows()` stands for what that helper gives back."""
    own = own_attribute(call.func, method.owner or "") if not call.args else None
    helper = method.cls.methods.get(own) if method.cls is not None and own is not None else None
    if helper is None or helper.owner != method.owner:
        yield call, method
        return
    inner = [each for each in helper.calls if looks_releasing(each) or last_name(each) in ends]
    yield from ((each, helper) for each in inner) if inner else [(call, method)]


def _clears_a_table(call: ast.Call, method: Function) -> bool:
    """One that `__init__` makes empty."""
    begun = method.cls.methods.get("__init__") if method.cls is not None else None
    match call.func:
        case ast.Attribute(value=table, attr="clear") if begun is not None:
            field = own_attribute(table, method.owner or "")
            return any(
                own_attribute(to, begun.owner or "") == field and _is_empty(value)
                for to, value in assignments(begun)
            )
    return False


def _is_empty(value: ast.expr) -> bool:
    return ast.unparse(value) in EMPTY


def empties(node: ast.stmt, own: str, attribute: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=table, attr="clear"), args=[])):
            return own_attribute(table, own) == attribute
    return any(own_attribute(to, own) == attribute and _is_empty(value) for to, value in assigned_by(node))


def _fields_behind(call: ast.Call, method: Function, own: str) -> Iterator[str]:
    """Of the object, from which what the call is told comes, or what it is called on: through local names and
    loops. Not of `self.pool.close()`, which may end everything that is in the others."""
    pending: list[ast.expr] = list(call.args)
    if not pending and isinstance(call.func, ast.Attribute):
        pending += [call.func.value] if own_attribute(call.func.value, own) is None else []
    seen: set[str] = {own}
    while pending:
        for node in walk(pending.pop()):
            if isinstance(node, ast.Attribute) and (field := own_attribute(node, own)) is not None:
                yield field
            elif isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                pending += [*_named(method, node.id), *_gone_over_as(method, node.id)]


def _named(method: Function, name: str) -> Iterator[ast.expr]:
    """What is given to the name, alone or in `key, rows = self.tables.popitem()`."""
    for target, value in assignments(method):
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if any(getattr(each, "id", "") == name for each in names):
            yield value


def _gone_over_as(method: Function, name: str) -> Iterator[ast.expr]:
    for node in method.nodes:
        if isinstance(node, LOOPS) and any(getattr(each, "id", "") == name for each in walk(node.target)):
            yield node.iter
