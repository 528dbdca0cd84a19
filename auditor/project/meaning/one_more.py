"""References that a count hands out: `mine = states.incref(beam.state)` is one more, and its holder's."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor)


def is_one_more(function: Function, acquire: ast.Call, ending: Set[str]) -> bool:
    """What the call returns is used, and this function gives back none under the name that it was asked for:
    one that another loop calls so is another thing. `ending` are the names of what gives back."""
    told = _names_of(function, acquire)
    if any(isinstance(each, ast.Expr) and each.value is acquire for each in function.statements):
        return False
    others = {id(node) for node in _of_other_loops(function, acquire)}
    return not any(
        ast.unparse(given) in told
        for call in function.calls
        if getattr(call.func, "attr", "") in ending and id(call) not in others
        for given in call.args
    )


def _names_of(function: Function, acquire: ast.Call) -> set[str]:
    """What the call is told, and other names of that: `state = beam.state`."""
    told = {ast.unparse(each) for each in acquire.args}
    names = [(ast.unparse(target), ast.unparse(value)) for target, value in assignments(function)]
    same = [pair for pair in names if not told.isdisjoint(pair)]
    return told.union(*same)


def _of_other_loops(function: Function, acquire: ast.Call) -> Iterator[ast.AST]:
    """What lies in loops that give the name of the asked object anew."""
    roots = {node.id for each in acquire.args for node in walk(each) if isinstance(node, ast.Name)}
    for loop in function.statements:
        if isinstance(loop, LOOPS) and not any(node is acquire for node in walk(loop)):
            named = {node.id for node in walk(loop.target) if isinstance(node, ast.Name)}
            yield from walk(loop) if roots & named else ()
