"""Generators that are left in the middle: whoever goes over one and breaks off closes it at its `yield`, so
that what stands behind its loop, or behind the `yield` itself, never runs."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.lease import Leak, Loss
from auditor.flow.trace import span_of
from auditor.model import Step
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.outcome import Outcome, loses_normally
from auditor.source.nodes import walk

ALONGSIDE = frozenset({"enumerate", "zip", "tqdm"})
"""Calls that go over what they are given, and stop where their own consumer stops."""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LOOPS = ast.For | ast.AsyncFor | ast.While


def closed_by_consumers(outcome: Outcome, calls: Calls) -> Outcome:
    """That a generator is closed while it holds the lease is no accident where a loop of the tree does it."""
    lease, function = outcome.lease, outcome.function
    if function.is_context_manager or loses_normally(lease):
        return outcome
    lent = _lent_until_asked_again(outcome)
    closed = any(leak.loss is Loss.CLOSE for leak in lease.leaks)
    if not (closed or lent):
        return outcome
    stopping = [each for each, _ in _consumers_that_stop(function, calls)]
    if not stopping or (lent and any(_ends_itself(consumer, outcome) for consumer in stopping)):
        return outcome
    leaks = [replace(leak, loss=Loss.RETURN) if leak.loss is Loss.CLOSE else leak for leak in lease.leaks]
    leaks += [_lost_at(each, outcome) for each in lent if not closed]
    return replace(outcome, lease=replace(lease, leaks=tuple(leaks)))


def _lent_until_asked_again(outcome: Outcome) -> list[ast.Yield]:
    """`yield block`, and `give_back(block)` behind it, in no `finally` and no `with`: the one way it ends."""
    lease, function = outcome.lease, outcome.function
    if lease.handed_over or not (lease.releases and lease.holder):
        return []
    found = [
        node
        for node in function.nodes
        if isinstance(node, ast.Yield) and getattr(node.value, "id", "") == lease.holder
    ]
    guarded = {
        id(inner)
        for node in function.statements
        if isinstance(node, ast.Try | ast.With | ast.AsyncWith)
        for inner in walk(node)
    }
    behind = all(end.line > each.lineno for end in lease.releases for each in found)
    return found if behind and guarded.isdisjoint(map(id, found)) else []


def _ends_itself(consumer: Function, outcome: Outcome) -> bool:
    """Some call in it is called like the ends in the generator."""
    lines = {end.line for end in outcome.lease.releases}
    ends = {last_part(call.func) for call in outcome.function.calls if call.lineno in lines}
    return any(last_part(call.func) in ends for call in consumer.calls)


def _lost_at(lent: ast.Yield, outcome: Outcome) -> Leak:
    lease, module = outcome.lease, outcome.function.module
    at = span_of(module.path, lent, module.lines)
    begun = Step(lease.span.path, lease.span.line, lease.span.column, "acquired here")
    lost = Step(at.path, at.line, at.column, LAST_WORDS[Loss.CLOSE])
    return Leak(Loss.RETURN, at, lease.holder, (begun, lost))


def _consumers_that_stop(
    generator: Function, calls: Calls
) -> Iterator[tuple[Function, ast.For | ast.AsyncFor]]:
    for module in calls.model.project.parsed():
        if f"{generator.name}(" not in module.text:
            continue
        calling = (each for each in list(module.by_node.values()) if f"{generator.name}(" in each.text)
        for function in calling:
            for loop in function.nodes:
                if isinstance(loop, ast.For | ast.AsyncFor) and _stops(loop.body):
                    taken = _gone_over(loop.iter)
                    if any(calls.model.callee(function, call.func) is generator for call in taken):
                        yield function, loop


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
