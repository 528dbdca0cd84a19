"""Lists of leases of which only a stretch is given back: `rows = pool.take(n)`, and after the work
`pool.put_all(rows[:used])`, with no word of the rows behind."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def given_back_in_part(function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.Call]:
    """The one end in the function, where that is told a stretch and nobody speaks of another one."""
    name = _called(function, call)
    ending = (
        [each for each in function.calls if last_name(each) in ends and _speaks(each, name)] if name else []
    )
    stretches = [
        node
        for node in function.nodes
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and _is(node.value, name)
    ]
    if len(ending) != 1 or len(stretches) != 1 or not any(stretches[0] is each for each in ending[0].args):
        return
    if _ends_somewhere(stretches[0].slice, name) and not _is_measured(function, stretches[0].slice, name):
        yield ending[0]


def _called(function: Function, call: ast.Call) -> str:
    """The name that the list is given, once."""
    names = [
        target.id for target, value in assignments(function) if value is call and isinstance(target, ast.Name)
    ]
    bound = [
        node for node in function.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return names[0] if len(names) == 1 and sum(each.id == names[0] for each in bound) == 1 else ""


def _ends_somewhere(cut: ast.expr, name: str) -> bool:
    """`[:used]`, by a name: `[1:]` has been said of the first, and `[:len(rows)]` is all of it."""
    if not isinstance(cut, ast.Slice) or cut.lower is not None or cut.step is not None:
        return False
    return isinstance(cut.upper, ast.Name) and cut.upper.id != name


def _is_measured(function: Function, cut: ast.expr, name: str) -> bool:
    """The name is the length of the list, or the list was asked for by it: `rows = pool.take(used)`."""
    bound = cut.upper.id if isinstance(cut, ast.Slice) and isinstance(cut.upper, ast.Name) else ""
    for target, value in assignments(function):
        if isinstance(target, ast.Name) and target.id == bound and f"len({name})" in ast.unparse(value):
            return True
        if isinstance(target, ast.Name) and target.id == name:
            return any(isinstance(each, ast.Name) and each.id == bound for each in walk(value))
    return False


def _speaks(call: ast.Call, name: str) -> bool:
    return any(_is(node, name) for each in call.args for node in walk(each))


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
