"""Generators that are left in the middle: whoever goes over one and breaks off closes it at its `yield`, so
that what stands behind its loop, or behind the `yield` itself, never runs. So does an error in the body of a
`with` that a context manager without `finally` serves; somebody around it survives that."""

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
    if loses_normally(lease):
        return outcome
    lent = _lent_until_asked_again(outcome)
    closed = any(leak.loss is Loss.CLOSE for leak in lease.leaks)
    if not (closed or lent):
        return outcome
    if function.is_context_manager:
        lost = [_lost_at(each, outcome) for each in lent if not closed]
        return _told(outcome, lost) if _is_survived(function, calls) else outcome
    stopping = [each for each, _ in _consumers_that_stop(function, calls)]
    if not stopping or (lent and any(_ends_itself(consumer, outcome) for consumer in stopping)):
        return outcome
    return _told(outcome, [_lost_at(each, outcome) for each in lent if not closed])


def _told(outcome: Outcome, others: list[Leak]) -> Outcome:
    """That it is closed there counts as an ordinary way out."""
    lease = outcome.lease
    leaks = [replace(leak, loss=Loss.RETURN) if leak.loss is Loss.CLOSE else leak for leak in lease.leaks]
    return replace(outcome, lease=replace(lease, leaks=(*leaks, *others)))


def _is_survived(manager: Function, calls: Calls) -> bool:
    """`try: with staged(pool) as buffer: send(buffer) except OSError: failed += 1`"""
    for function in _calling(manager, calls):
        for node in function.statements:
            if isinstance(node, ast.Try) and any(map(_goes_on, node.handlers)):
                for each in (inner for part in node.body for inner in walk(part)):
                    if isinstance(each, ast.With | ast.AsyncWith) and _enters(each, function, manager, calls):
                        return True
    return False


def _goes_on(handler: ast.ExceptHandler) -> bool:
    return not any(isinstance(node, ast.Raise) for each in handler.body for node in walk(each))


def _enters(node: ast.With | ast.AsyncWith, function: Function, manager: Function, calls: Calls) -> bool:
    entered = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    works = any(isinstance(inner, ast.Call) for each in node.body for inner in walk(each))
    return works and any(_calls(each, function, manager, calls) for each in entered)


def _calls(call: ast.Call, function: Function, generator: Function, calls: Calls) -> bool:
    """For sure, or by the one name that there is."""
    known = calls.model.callee(function, call.func)
    return known is generator if known is not None else calls.targets(function, call)[0] == (generator,)


def _calling(generator: Function, calls: Calls) -> Iterator[Function]:
    for module in calls.model.project.parsed():
        if f"{generator.name}(" in module.text:
            yield from (each for each in list(module.by_node.values()) if f"{generator.name}(" in each.text)


def _lent_until_asked_again(outcome: Outcome) -> list[ast.Yield]:
    """`yield block`, and `give_back(block)` behind it, in no `finally` and no `with`: the one way it ends."""
    lease, function = outcome.lease, outcome.function
    if lease.handed_over or not (lease.releases and lease.holder):
        return []
    found = [
        node
        for node in function.nodes
        if isinstance(node, ast.Yield) and _holder_of(node.value) == lease.holder
    ]
    guarded = {
        id(inner)
        for node in function.statements
        if isinstance(node, ast.Try | ast.With | ast.AsyncWith)
        for inner in walk(node)
    }
    behind = all(end.line > each.lineno for end in lease.releases for each in found)
    return found if behind and guarded.isdisjoint(map(id, found)) else []


def _holder_of(value: ast.expr | None) -> str:
    """`slot` of `yield slot`, and of `yield slot.store(data)`, which shows it."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return value.id if isinstance(value, ast.Name) else ""


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


def _consumers_that_stop(generator: Function, calls: Calls) -> Iterator[tuple[Function, ast.AST]]:
    for function in _calling(generator, calls):
        for node, source in _left_early(function):
            if any(_calls(call, function, generator, calls) for call in _gone_over(source)):
                yield function, node


def _left_early(function: Function) -> Iterator[tuple[ast.AST, ast.expr]]:
    """What is gone over by loops that may stop, and by `any()`, `all()` and `next()`, which do."""
    for node in function.nodes:
        match node:
            case ast.For(iter=source, body=body) | ast.AsyncFor(iter=source, body=body) if _stops(body):
                yield node, source
            case ast.Call(func=ast.Name(id="any" | "all" | "next"), args=[given, *_]):
                match given:
                    case ast.GeneratorExp(generators=[ast.comprehension(iter=source), *_]):
                        yield node, source
                    case _:
                        yield node, given


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
