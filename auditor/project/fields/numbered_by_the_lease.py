"""Records that lie under the number which was lent: `self.workers[rank] = Worker(node, rank)`. Who takes one
out by its number, `self.workers.pop(rank)`, and gives that back, `self.ranks.vacate(rank)`, has not forgotten
what is in the record."""

import ast
from collections.abc import Set

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name


def gives_back_its_number(
    method: Function, filling: Function, holder: str, tables: Set[str], ends: Set[str]
) -> bool:
    """`holder` is what the `filling` function calls the lease; `ends` are the names of what gives it back."""
    numbered = any(
        isinstance(target, ast.Subscript)
        and own_attribute(target.value, filling.owner or "") in tables
        and getattr(target.slice, "id", None) == holder
        for target, _ in assignments(filling)
    )
    told = {each.id for call in method.calls if last_name(call) in ends for each in _names(call)}
    return numbered and not told.isdisjoint(_taken_by(method, tables))


def _taken_by(method: Function, tables: Set[str]) -> set[str]:
    """Names of the keys by which it takes records out."""
    own, found = method.owner or "", set()
    for node in method.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=table, attr="pop"), args=[ast.Name(id=name), *_]):
                pass
            case ast.Subscript(value=table, slice=ast.Name(id=name), ctx=ast.Del()):
                pass
            case _:
                continue
        if own_attribute(table, own) in tables:
            found.add(name)
    return found


def _names(call: ast.Call) -> list[ast.Name]:
    return [each for each in call.args if isinstance(each, ast.Name)]
