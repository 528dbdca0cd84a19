"""Branches on which nothing was granted: `got = budget.take(n)` grants all or nothing, and `if got < n:` asks
for nothing else; so does `if len(pages) < n:` of a list that is empty otherwise."""

import ast
from collections.abc import Iterable, Iterator, Sequence

from auditor.flow.lease import Leak
from auditor.project.code.bindings import assignments, given_to, ways
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
    all_of_it = [each for each in answers if each is not None and _is_all(taker, each)]
    return bool(nothing) and len(all_of_it) == 1 and len(nothing) + 1 == len(answers)


def _is_nothing(answer: ast.expr) -> bool:
    return isinstance(answer, ast.Constant) or (isinstance(answer, ast.List) and not answer.elts)


def _is_all(taker: Function, answer: ast.expr) -> bool:
    """`n`, `[self.take() for _ in range(n)]`, or `taken` of `taken = self._idle[-n:]`, where fewer are
    refused."""
    match answer:
        case ast.Name(id=name) if name in taker.parameters:
            return True
        case ast.Name(id=name):
            given = [way for each in given_to(taker, name) for way in ways(each) if not _is_nothing(way)]
            return bool(given) and all(_is_all(taker, each) for each in given)
        case ast.ListComp(
            generators=[
                ast.comprehension(iter=ast.Call(func=ast.Name(id="range"), args=[ast.Name(id=name)]), ifs=[])
            ]
        ):
            return name in taker.parameters
        case ast.Subscript(
            slice=ast.Slice(lower=ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=name)), upper=None)
            | ast.Slice(lower=None, upper=ast.Name(id=name))
        ):
            return name in taker.parameters and _refuses_more_than_there_are(taker, name)
    return False


def _refuses_more_than_there_are(taker: Function, wanted: str) -> bool:
    """`if len(self._idle) < n: return []`"""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], ast.Return)
        and isinstance(node.test, ast.Compare)
        and wanted in {each.id for each in walk(node.test) if isinstance(each, ast.Name)}
        for node in taker.statements
    )


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
