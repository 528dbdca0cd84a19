"""What one turn of a loop begins and a later one ends: `if i == first: start()`, `elif i == last: stop()`.

Which turns there are is in the numbers, and whether the last of them comes nobody can tell from the ways
through the loop."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.modules import Function
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor, ast.While)


def ended_in_a_later_turn(function: Function, acquire: ast.Call, releases: Sequence[ast.AST]) -> bool:
    """Both stand under conditions of their own in one loop, and both conditions ask for what tells the turns
    apart."""
    for loop in function.nodes:
        if not isinstance(loop, LOOPS):
            continue
        begun = _choices(loop, acquire)
        ended = [_choices(loop, each) for each in releases]
        apart = [each for each in ended if not any(one is other for one in begun for other in each)]
        turning = set(_turning(loop))
        if any(_asked(begun) & _asked(each) & turning for each in apart):
            return True
    return False


def _choices(loop: ast.For | ast.AsyncFor | ast.While, inner: ast.AST) -> list[ast.If]:
    """In whose bodies it stands; what stands in an `else` has conditions of its own."""
    return [
        node
        for node in walk(loop)
        if isinstance(node, ast.If)
        and any(each is inner for statement in node.body for each in walk(statement))
    ]


def _asked(choices: Sequence[ast.If]) -> set[str]:
    """Names that they compare with something."""
    compared = [part for each in choices for part in walk(each.test) if isinstance(part, ast.Compare)]
    return {node.id for part in compared for node in walk(part) if isinstance(node, ast.Name)}


def _turning(loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[str]:
    """The loop's own names, and what it counts."""
    if not isinstance(loop, ast.While):
        yield from (node.id for node in walk(loop.target) if isinstance(node, ast.Name))
    for node in walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
