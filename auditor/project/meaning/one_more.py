"""References that a count hands out: `mine = states.incref(beam.state)` is one more, and its holder's; so is
`self.baseline = self.serving.retain()`, which returns the object itself."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import assignments, ways
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor)


def is_one_more(function: Function, acquire: ast.Call, ending: Set[str]) -> bool:
    """What the call returns is used, and this function gives back none under the name that it was asked for:
    one that another loop calls so is another thing. `ending` are the names of what gives back."""
    return _is_another(function, acquire, acquire.args, ending)


def is_one_more_of_itself(function: Function, acquire: ast.Call, ending: Set[str]) -> bool:
    """The same of an object that is asked to count, and ends by its own method, where the result gets a name
    or a place."""
    given = any(way is acquire for _, value in assignments(function) for way in ways(value))
    asked = [acquire.func.value] if given and isinstance(acquire.func, ast.Attribute) else []
    return bool(asked) and _is_another(function, acquire, asked, ending)


def _is_another(function: Function, acquire: ast.Call, asked: Sequence[ast.expr], ending: Set[str]) -> bool:
    told = _names_of(function, asked)
    if any(isinstance(each, ast.Expr) and each.value is acquire for each in function.statements):
        return False
    others = {id(node) for node in _of_other_loops(function, acquire, asked)}
    return not any(
        ast.unparse(given) in told
        for call in function.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ending and id(call) not in others
        for given in (call.args if asked is acquire.args else [call.func.value])
    )


def _names_of(function: Function, asked: Sequence[ast.expr]) -> set[str]:
    """What is counted for, and other names of that: `state = beam.state`."""
    told = {ast.unparse(each) for each in asked}
    names = [(ast.unparse(target), ast.unparse(value)) for target, value in assignments(function)]
    same = [pair for pair in names if not told.isdisjoint(pair)]
    return told.union(*same)


def _of_other_loops(function: Function, acquire: ast.Call, asked: Sequence[ast.expr]) -> Iterator[ast.AST]:
    """What lies in loops that give the name of the asked object anew."""
    roots = {node.id for each in asked for node in walk(each) if isinstance(node, ast.Name)}
    for loop in function.statements:
        if isinstance(loop, LOOPS) and not any(node is acquire for node in walk(loop)):
            named = {node.id for node in walk(loop.target) if isinstance(node, ast.Name)}
            yield from walk(loop) if roots & named else ()
