"""Lists of leases of which only a stretch is given back: `rows = pool.take(n)`, and after the work
`pool.put_all(rows[:used])`, with no word of the rows behind; or `marks = marks[warmup:]`, and then a loop
that gives back what is left under the name."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def given_back_in_part(function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.expr]:
    """The one stretch that the function gives back, or goes on with, where it speaks of no other."""
    name = _called(function, call)
    stretches = list(_stretches(function, name)) if name else []
    if len(stretches) != 1:
        return
    (stretch,) = stretches
    if _is_rest(stretch.slice):
        found = _goes_on_with(function, stretch, name, ends)
    else:
        ending = [each for each in function.calls if last_name(each) in ends and _speaks(each, name)]
        told = len(ending) == 1 and any(stretch is each for each in ending[0].args)
        found = told and not _is_measured(function, stretch.slice, name)
    if found:
        yield stretch


def _goes_on_with(function: Function, stretch: ast.Subscript, name: str, ends: Set[str]) -> bool:
    """`marks = marks[warmup:]`, and below `for mark in marks: pool.put(mark)`, which ends them."""
    rebound = any(_is(target, name) and value is stretch for target, value in assignments(function))
    loops = [
        node
        for node in function.statements
        if isinstance(node, ast.For) and any(last_name(each) in ends for each in _calls(node))
    ]
    below = len(loops) == 1 and _is(loops[0].iter, name) and loops[0].lineno > stretch.lineno
    return rebound and below


def _calls(loop: ast.For) -> Iterator[ast.Call]:
    return (node for part in loop.body for node in walk(part) if isinstance(node, ast.Call))


def _stretches(function: Function, name: str) -> Iterator[ast.Subscript]:
    """Those that a name bounds: `[1:]` and `[:-1]` have been said of the first, or the last."""
    for node in function.nodes:
        if isinstance(node, ast.Subscript) and _is(node.value, name) and _is_rest(node.slice) is not None:
            yield node


def _called(function: Function, call: ast.Call) -> str:
    """The name of the list that it makes, `rows = pool.take(n)`, or that is made of such."""
    for target, value in assignments(function):
        made = value.elt if isinstance(value, ast.ListComp) else value
        if made is call and isinstance(target, ast.Name):
            return target.id
    return ""


def _is_rest(cut: ast.expr) -> bool | None:
    """Whether it is `[used:]`, as against `[:used]`; None where it is neither."""
    match cut:
        case ast.Slice(lower=None, upper=ast.Name(), step=None):
            return False
        case ast.Slice(lower=ast.Name(), upper=None, step=None):
            return True
    return None


def _is_measured(function: Function, cut: ast.expr, name: str) -> bool:
    """The name is the length of the list, or the list was asked for by it, `rows = pool.take(used)`; or it
    counts the turns of a loop, which may be as many."""
    bounds = (cut.lower, cut.upper) if isinstance(cut, ast.Slice) else ()
    bound = next((each.id for each in bounds if isinstance(each, ast.Name)), "")
    if any(isinstance(node, ast.AugAssign) and _is(node.target, bound) for node in function.statements):
        return True
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
