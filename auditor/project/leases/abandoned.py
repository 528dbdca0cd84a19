"""Generators that a consumer in the tree leaves before they are done: what they hold at their `yield` is
lost there, for nothing behind it is run.

`for record in records(path): if wanted(record): return record`."""

import ast
from collections.abc import Iterator

from auditor.flow.lease import Leak, Loss
from auditor.project.code.bindings import TEST_FILE, given_to
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import functions_with
from auditor.source.nodes import walk

ONWARD = frozenset({"enumerate", "zip", "map", "filter", "iter", "islice", "tqdm"})
"""Functions that ask for one after the other as they are asked themselves."""

LOOPS = (ast.For, ast.AsyncFor, ast.While)


def left_early(calls: Calls, function: Function) -> bool:
    """Whether somebody leaves a loop over it, or asks for the first one only, and does nothing about what he
    got last."""
    if function.is_context_manager or not any(isinstance(node, ast.Yield) for node in function.nodes):
        return False
    for module in list(calls.model.project.parsed()):
        if f"{function.name}(" not in module.text or TEST_FILE.search(module.path):
            continue
        for consumer, asked in functions_with(module, {function.name}):
            if consumer is not function and any(
                calls.targets(consumer, call)[0] == (function,) and _leaves(consumer, call) for call in asked
            ):
                return True
    return False


def as_ways_out(leaks: tuple[Leak, ...]) -> tuple[Leak, ...]:
    """What its consumers really do is no exception."""
    return tuple(
        Leak(Loss.RETURN, each.at, each.holder, each.trace) if each.loss is Loss.CLOSE else each
        for each in leaks
    )


def _leaves(consumer: Function, call: ast.Call) -> bool:
    for node in consumer.nodes:
        match node:
            case ast.For(iter=over) | ast.AsyncFor(iter=over) if _goes_over(consumer, over, call):
                return any(_untouched(suite, node.target) for suite in _early_ends(node.body))
            case ast.Call(func=ast.Name(id="next"), args=[asked, *_]) if asked is call:
                return True
    return False


def _goes_over(consumer: Function, over: ast.expr, call: ast.Call) -> bool:
    match over:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if (
            over is not call and name in ONWARD
        ):
            return any(_goes_over(consumer, each, call) for each in args)
        case ast.Name(id=name):
            return list(given_to(consumer, name)) == [call]
    return over is call


def _early_ends(body: list[ast.stmt], *, outermost: bool = True) -> Iterator[list[ast.stmt]]:
    """The statement lists that end with a way out of the loop."""
    if isinstance(body[-1], ast.Return) or (outermost and isinstance(body[-1], ast.Break)):
        yield body
    for statement in body:
        inner = outermost and not isinstance(statement, LOOPS)
        for name in ("body", "orelse", "finalbody"):
            if suite := getattr(statement, name, []):
                yield from _early_ends(suite, outermost=inner)


def _untouched(suite: list[ast.stmt], target: ast.expr) -> bool:
    """Not `states.release(state); break`: then what it got last is seen to."""
    names = {each.id for each in walk(target) if isinstance(each, ast.Name)}
    calls = (node for statement in suite for node in walk(statement) if isinstance(node, ast.Call))
    given = (argument for call in calls for argument in call.args)
    return not any(isinstance(each, ast.Name) and each.id in names for each in given)
