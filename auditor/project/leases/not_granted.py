"""Branches on which nothing was granted: `got = budget.take(n)` grants all or nothing, and `if got < n:` asks
for nothing else; so does `if len(pages) < n:` of a list that is empty otherwise."""

import ast
from collections.abc import Iterable, Iterator, Sequence

from auditor.flow.lease import Leak
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def of_what_was_granted(
    function: Function, acquire: ast.Call, takers: Iterable[Function], leaks: Sequence[Leak]
) -> tuple[Leak, ...]:
    """Without those on such branches; one who grants what there is may have granted less."""
    takers = list(takers)
    if not (takers and all(map(_grants_all_or_nothing, takers))):
        return tuple(leaks)
    refused = set(_lines_where_refused(function, acquire))
    return tuple(leak for leak in leaks if leak.at.line not in refused)


def _grants_all_or_nothing(taker: Function) -> bool:
    """It answers with a constant on some way, and with what it was asked for, or as many, on the others."""
    answers = [node.value for node in taker.statements if isinstance(node, ast.Return)]
    nothing = [each for each in answers if each is None or _is_nothing(each)]
    all_of_it = [each for each in answers if each is not None and _is_all(each, set(taker.parameters))]
    return bool(nothing) and len(all_of_it) == 1 and len(nothing) + 1 == len(answers)


def _is_nothing(answer: ast.expr) -> bool:
    return isinstance(answer, ast.Constant) or (isinstance(answer, ast.List) and not answer.elts)


def _is_all(answer: ast.expr, told: set[str]) -> bool:
    """`n`, or `[self.take() for _ in range(n)]`."""
    match answer:
        case ast.Name(id=name):
            return name in told
        case ast.ListComp(
            generators=[
                ast.comprehension(iter=ast.Call(func=ast.Name(id="range"), args=[ast.Name(id=name)]), ifs=[])
            ]
        ):
            return name in told
    return False


def _lines_where_refused(function: Function, acquire: ast.Call) -> Iterator[int]:
    wanted = {ast.unparse(each) for each in acquire.args[:1]}
    names = {
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and any(each is acquire for each in walk(value))
    }
    for node in function.statements:
        match node:
            case ast.If(
                test=ast.Compare(
                    left=ast.Name(id=name) | ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]),
                    ops=[ast.Lt() | ast.NotEq()],
                    comparators=[asked],
                )
            ) if name in names and ast.unparse(asked) in wanted:
                yield from range(node.body[0].lineno, (node.body[-1].end_lineno or node.lineno) + 1)
