"""Generators that are left in the middle: whoever goes over one and breaks off closes it at its `yield`, so
that what stands behind its loop never runs."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.lease import Loss
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.outcome import Outcome, loses_normally

ALONGSIDE = frozenset({"enumerate", "zip", "tqdm"})
"""Calls that go over what they are given, and stop where their own consumer stops."""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LOOPS = ast.For | ast.AsyncFor | ast.While


def closed_by_consumers(outcome: Outcome, calls: Calls) -> Outcome:
    """That a generator is closed while it holds the lease is no accident where a loop of the tree does it."""
    lease, function = outcome.lease, outcome.function
    closed = any(leak.loss is Loss.CLOSE for leak in lease.leaks)
    if not closed or function.is_context_manager or loses_normally(lease):
        return outcome
    if not any(True for _ in _consumers_that_stop(function, calls)):
        return outcome
    leaks = (replace(leak, loss=Loss.RETURN) if leak.loss is Loss.CLOSE else leak for leak in lease.leaks)
    return replace(outcome, lease=replace(lease, leaks=tuple(leaks)))


def _consumers_that_stop(generator: Function, calls: Calls) -> Iterator[ast.For | ast.AsyncFor]:
    for module in calls.model.project.parsed():
        if f"{generator.name}(" not in module.text:
            continue
        calling = (each for each in list(module.by_node.values()) if f"{generator.name}(" in each.text)
        for function in calling:
            for loop in function.nodes:
                if isinstance(loop, ast.For | ast.AsyncFor) and _stops(loop.body):
                    taken = _gone_over(loop.iter)
                    if any(calls.model.callee(function, call.func) is generator for call in taken):
                        yield loop


def _gone_over(source: ast.expr) -> Iterator[ast.Call]:
    """`stage(outputs)` itself, and in `enumerate(stage(outputs))`."""
    if not isinstance(source, ast.Call):
        return
    if isinstance(source.func, ast.Name) and source.func.id in ALONGSIDE:
        for given in source.args:
            yield from _gone_over(given)
    else:
        yield source


def _stops(body: list[ast.stmt], ways: tuple[type[ast.stmt], ...] = (ast.Break, ast.Return)) -> bool:
    """The loop is left by `break`, or by `return`, before the generator has come to its end."""
    for statement in body:
        if isinstance(statement, ways):
            return True
        if isinstance(statement, FUNCTIONS):
            continue
        inner = (ast.Return,) if isinstance(statement, LOOPS) else ways  # a `break` there leaves that one
        blocks = [getattr(statement, "body", []), getattr(statement, "orelse", [])]
        blocks += [getattr(statement, "finalbody", [])]
        blocks += [each.body for each in getattr(statement, "cases", [])]
        if any(_stops(block, inner) for block in blocks):
            return True
    return False
