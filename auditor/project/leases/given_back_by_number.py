"""Ways out of a loop behind another loop that goes over the turns before and gives back what they took:

for shard in range(low, high):
    if not locks.lock(shard):
        for taken in range(low, shard):
            locks.unlock(taken)
        return False
"""

import ast
from collections.abc import Iterator, Set

from auditor.flow.lease import Leak
from auditor.project.code.bindings import names_bound, told_by_position
from auditor.project.code.modules import Function, last_part
from auditor.source.nodes import walk


def without_given_back(
    function: Function, acquire: ast.Call, leaks: tuple[Leak, ...], ends: Set[str]
) -> tuple[Leak, ...]:
    """The leaks but for those of the turns before, of which such a loop gives back each."""
    if not leaks or not any(isinstance(node, ast.For) for node in function.statements):
        return leaks
    behind = {line for loop in _around(function, acquire) for line in _lines_behind(loop, acquire, ends)}
    return tuple(leak for leak in leaks if leak.at.line not in behind)


def _around(function: Function, acquire: ast.Call) -> Iterator[ast.For]:
    for loop in function.of_kind(ast.For):
        if any(node is acquire for node in walk(loop)):
            yield loop


def _lines_behind(loop: ast.For, acquire: ast.Call, ends: Set[str]) -> Iterator[int]:
    """Where this turn is refused; what is taken in a turn is none of those before."""
    turn, names = set(names_bound(loop)), {to.id for to in _given(loop, acquire)}
    for node in walk(loop):
        if not isinstance(node, ast.If) or not _asks_for(node.test, acquire, names):
            continue
        undone = [at for at, each in enumerate(node.body) if _goes_back(each, turn, ends)]
        for statement in node.body[undone[0] :] if undone else ():
            if isinstance(statement, ast.Return | ast.Raise | ast.Break):
                yield statement.lineno


def _given(loop: ast.For, acquire: ast.Call) -> Iterator[ast.Name]:
    for node in walk(loop):
        if isinstance(node, ast.Assign) and any(each is acquire for each in walk(node.value)):
            yield from (target for target in node.targets if isinstance(target, ast.Name))


def _asks_for(test: ast.expr, acquire: ast.Call, names: Set[str]) -> bool:
    return any(node is acquire or getattr(node, "id", "") in names for node in walk(test))


def _goes_back(statement: ast.stmt, turn: Set[str], ends: Set[str]) -> bool:
    """`for taken in range(low, shard)`, `for each in keys[:at]`: as far as this turn, without it."""
    if not isinstance(statement, ast.For):
        return False
    numbers = statement.iter
    if isinstance(numbers, ast.Call) and last_part(numbers.func) == "reversed" and numbers.args:
        numbers = numbers.args[0]
    match numbers:
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            as_far = any(_is_of(bound, turn) for bound in bounds)
        case ast.Subscript(slice=ast.Slice(upper=ast.expr() as bound)):
            as_far = _is_of(bound, turn)
        case _:
            return False
    each = set(names_bound(statement))
    return as_far and any(
        last_part(call.func) in ends and any(_is_of(told, each) for _, told in told_by_position(call))
        for call in walk(statement)
        if isinstance(call, ast.Call)
    )


def _is_of(value: ast.expr, names: Set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in walk(value))
