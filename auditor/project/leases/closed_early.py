"""Generators that are left in the middle: whoever goes over one and breaks off closes it at its `yield`, so
that what stands behind its loop, or behind the `yield` itself, never runs. So does an error in the body of a
`with` that a context manager without `finally` serves; somebody around it survives that."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.lease import Leak, Loss
from auditor.flow.trace import span_of
from auditor.model import Step
from auditor.project.code.bindings import assignments, awaited
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.project.leases.consumers import Consumer, asks, calling, consumers
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.outcome import Outcome, loses_normally
from auditor.source.nodes import walk


def closed_by_consumers(outcomes: list[Outcome], calls: Calls) -> list[Outcome]:
    """With what is lost because a generator is closed while it holds the lease: that is no accident where a
    loop of the tree does it."""
    return [each for outcome in outcomes for each in _closed_by_consumers(outcome, calls)]


def _closed_by_consumers(outcome: Outcome, calls: Calls) -> Iterator[Outcome]:
    """Where others go over it to its end, whoever breaks off is told; else the generator."""
    lease, function = outcome.lease, outcome.function
    lent = [] if loses_normally(lease) else _lent_until_asked_again(outcome)
    closed = any(leak.loss is Loss.CLOSE for leak in lease.leaks)
    if loses_normally(lease) or not (closed or lent):
        yield outcome
    elif function.is_context_manager:
        lost = [_lost_at(each, outcome) for each in lent if not closed]
        yield _told(outcome, lost) if _is_survived(function, calls) else outcome
    else:
        found = list(consumers(function, calls))
        stopping = [each for each in found if each.stops]
        seeing_to = [each for each in stopping if any(_sees_to(each, outcome, at) for at in lent)]
        if len(stopping) < len(found):
            yield outcome
            yield from (_broken_off(each, outcome) for each in stopping if each not in seeing_to)
        else:
            lost = [_lost_at(each, outcome) for each in lent if not closed]
            yield _told(outcome, lost) if stopping and not seeing_to else outcome


def _broken_off(consumer: Consumer, outcome: Outcome) -> Outcome:
    """The loop that leaves the generator at its `yield`, as if it had acquired itself."""
    module = consumer.function.module
    at = span_of(module.path, consumer.call, module.lines)
    begun = Step(at.path, at.line, at.column, "goes over it, and stops before its end")
    lost = Step(
        outcome.lease.span.path,
        outcome.lease.span.line,
        outcome.lease.span.column,
        "what this acquired is given back behind the `yield` alone",
    )
    lease = replace(
        outcome.lease,
        span=at,
        symbol=consumer.function.qualname,
        text=" ".join(ast.unparse(consumer.call).split()),
        holder="",
        leaks=(Leak(Loss.RETURN, at, "", (begun, lost)),),
        releases=(),
    )
    return Outcome(consumer.function, consumer.call, outcome.acquisition, lease)


def _told(outcome: Outcome, others: list[Leak]) -> Outcome:
    """That it is closed there counts as an ordinary way out."""
    lease = outcome.lease
    leaks = [replace(leak, loss=Loss.RETURN) if leak.loss is Loss.CLOSE else leak for leak in lease.leaks]
    return replace(outcome, lease=replace(lease, leaks=(*leaks, *others)))


def _is_survived(manager: Function, calls: Calls) -> bool:
    """`try: with staged(pool) as buffer: send(buffer) except OSError: failed += 1`"""
    for function in calling(manager, calls):
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
    return works and any(asks(each, function, manager, calls) for each in entered)


def _lent_until_asked_again(outcome: Outcome) -> list[ast.Yield]:
    """`yield block`, and `give_back(block)` behind it, in no `finally` and no `with`: the one way it ends."""
    lease, function = outcome.lease, outcome.function
    if lease.handed_over or not lease.releases:
        return []
    names = {
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and awaited(value) is outcome.call
    }
    found = [node for node in function.of_kind(ast.Yield) if not names.isdisjoint(_holders_of(node.value))]
    guarded = {
        id(inner)
        for node in function.statements
        if isinstance(node, ast.Try | ast.With | ast.AsyncWith)
        for inner in walk(node)
    }
    behind = all(end.line > each.lineno for end in lease.releases for each in found)
    return found if behind and guarded.isdisjoint(map(id, found)) else []


def _holders_of(value: ast.expr | None) -> Iterator[str]:
    """`slot` of `yield slot`, of `yield name, slot`, and of `yield slot.store(data)`, which shows it."""
    for each in value.elts if isinstance(value, ast.Tuple) else [value]:
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            each = each.func.value
        yield each.id if isinstance(each, ast.Name) else ""


def _sees_to(consumer: Consumer, outcome: Outcome, lent: ast.Yield) -> bool:
    """Some call in it is called like the ends in the generator, or it hands on what came out."""
    function = consumer.function
    lines = {end.line for end in outcome.lease.releases}
    ends = {last_part(call.func) for call in outcome.function.calls if call.lineno in lines}
    if any(last_part(call.func) in ends for call in function.calls):
        return True
    if consumer.each is None:
        return isinstance(consumer.at, ast.Call) and last_part(consumer.at.func) in ("next", "anext")
    name = _called_there(lent, outcome.lease.holder, consumer.each)
    returned = (node.value for node in function.of_kind(ast.Return))
    parts = (part for value in returned for part in getattr(value, "elts", [value]))
    return any(isinstance(part, ast.Name) and part.id == name for part in parts)


def _called_there(lent: ast.Yield, holder: str, each: ast.expr) -> str:
    """What the loop over `yield name, slot` calls the slot: the last of `for number, (name, place) in ...`"""
    yielded = list(_holders_of(lent.value))
    names = [node.id for node in walk(each) if isinstance(node, ast.Name)][-len(yielded) :]
    if holder in yielded and len(names) == len(yielded):
        return names[yielded.index(holder)]
    return names[-1] if names else ""


def _lost_at(lent: ast.Yield, outcome: Outcome) -> Leak:
    lease, module = outcome.lease, outcome.function.module
    at = span_of(module.path, lent, module.lines)
    begun = Step(lease.span.path, lease.span.line, lease.span.column, "acquired here")
    lost = Step(at.path, at.line, at.column, LAST_WORDS[Loss.CLOSE])
    return Leak(Loss.RETURN, at, lease.holder, (begun, lost))
