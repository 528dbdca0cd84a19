"""What is counted once for each of a list, and counted down once for each that differs:

    for name in names:
        places.append(table.pin(name))
    ...
    for name in set(names):
        table.unpin(name)

A name that the list has twice was pinned twice, and stays pinned."""

import ast
from dataclasses import replace

from auditor.flow.lease import Leak, Loss
from auditor.model import Span, Step
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.project.outcome import Outcome, loses_normally
from auditor.project.shapes.name_bindings import bound_by, mentions
from auditor.project.shapes.use_counts import changed
from auditor.source.nodes import walk

ALL_OF_IT = frozenset({"sorted", "list", "tuple", "reversed"})
OF_SETS = ("set", "frozenset", "abstractset", "mutableset", "dict", "mapping", "keysview")
DEPTH = 3


def told_of_repeats(outcome: Outcome, calls: Calls) -> Outcome:
    """That what came again stays counted, where nothing keeps it from coming again."""
    lease, function = outcome.lease, outcome.function
    if not lease.releases or loses_normally(lease) or outcome.acquisition.declared:
        return outcome
    loop = _loop_around(function, outcome.call)
    if loop is None or not _may_repeat(function, loop.iter) or _is_looked_for(loop):
        return outcome
    ends = [_loop_of(function, span) for span in lease.releases]
    if not all(end is not None and _goes_over_each_once(function, loop, end) for end in ends):
        return outcome
    sets = sum(last_part(call.func) in ("set", "frozenset") for call in function.calls)
    reached = calls.targets(function, outcome.call)[0]
    if sets > 1 or not reached or not all(_counts(each, calls) for each in reached):
        return outcome
    return _told(outcome, lease.releases[-1])


def _told(outcome: Outcome, at: Span) -> Outcome:
    lease = outcome.lease
    begun = Step(lease.span.path, lease.span.line, lease.span.column, "acquired here, in each turn")
    ended = Step(at.path, at.line, at.column, "what came in several turns is released once")
    leak = Leak(Loss.FALL_THROUGH, at, lease.holder, (begun, ended), parted=True)
    return replace(outcome, lease=replace(lease, leaks=(*lease.leaks, leak)))


def _loop_around(function: Function, call: ast.Call) -> ast.For | None:
    """The innermost one, where the call is told what that goes over."""
    around = [
        node
        for node in function.statements
        if isinstance(node, ast.For | ast.While | ast.AsyncFor)
        and any(each is call for part in node.body for each in walk(part))
    ]
    inner = max(around, key=lambda node: node.lineno, default=None)
    if not isinstance(inner, ast.For):
        return None
    turn = frozenset(bound_by(inner.target))
    return inner if any(mentions(each, turn, frozenset()) for each in call.args) else None


def _may_repeat(function: Function, over: ast.expr) -> bool:
    """A list that somebody gives: not `set(names)`, `self.table`, nor what is said to be a set."""
    match over:
        case ast.Name(id=name):
            arguments = function.node.args if isinstance(function.node, ast.FunctionDef) else None
            told = [each for each in arguments.args if each.arg == name] if arguments else []
            said = ast.unparse(told[0].annotation).lower() if told and told[0].annotation else ""
            values = list(given_to(function, name))
            return (bool(told) and not values and not _bare(said).startswith(OF_SETS)) or (
                bool(values) and all(_is_a_list_of(function, value) for value in values)
            )
    return False


def _bare(annotation: str) -> str:
    return annotation.strip("'\"").rsplit("[")[0].rsplit(".")[-1]


def _is_a_list_of(function: Function, value: ast.expr) -> bool:
    """`[record(name) for name in names]` of what may repeat."""
    match value:
        case ast.ListComp(generators=[ast.comprehension(iter=over)]):
            return _may_repeat(function, over)
    return False


def _is_looked_for(loop: ast.For) -> bool:
    """`if name in seen: continue`"""
    return any(
        isinstance(node, ast.Compare)
        and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        and any(isinstance(each, ast.Name) for each in node.comparators)
        for part in loop.body
        for node in walk(part)
    )


def _loop_of(function: Function, span: Span) -> ast.For | None:
    """The loop whose turn is what is released there."""
    for node in function.statements:
        if isinstance(node, ast.For):
            turn = frozenset(bound_by(node.target))
            for call in (each for part in node.body for each in walk(part) if isinstance(each, ast.Call)):
                here = (call.lineno, call.col_offset + 1) == (span.line, span.column)
                if here and any(mentions(each, turn, frozenset()) for each in call.args):
                    return node
    return None


def _goes_over_each_once(function: Function, loop: ast.For, end: ast.For) -> bool:
    """`set(names)` of what the loop goes over or appends to; a set to which the loop adds."""
    match _within(end.iter):
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[ast.Name(id=name)]):
            return ast.unparse(loop.iter) == name or _is_filled(loop, name, "append")
        case ast.Name(id=name):
            given = list(given_to(function, name))
            empty = bool(given) and all(ast.unparse(value) == "set()" for value in given)
            return empty and _is_filled(loop, name, "add")
    return False


def _within(over: ast.expr) -> ast.expr:
    match over:
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name in ALL_OF_IT:
            return _within(inner)
    return over


def _is_filled(loop: ast.For, name: str, way: str) -> bool:
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.{way}"
        for part in loop.body
        for node in walk(part)
    )


def _counts(function: Function, calls: Calls, depth: int = DEPTH) -> bool:
    """Whether it raises a number that belongs to what it is told, `entry.pins += 1`, `self.pins[key] += 1`,
    itself or by what it asks; `self.hits += 1` tells of the pool."""
    own = function.owner or ""
    raised = (target for target, op in changed(function) if isinstance(op, ast.Add))
    if any(isinstance(target, ast.Subscript) or _is_of_another(target, own) for target in raised):
        return True
    asked = (each for call in function.calls for each in calls.targets(function, call)[0]) if depth else ()
    return any(_counts(each, calls, depth - 1) for each in asked)


def _is_of_another(target: ast.expr, own: str) -> bool:
    return isinstance(target, ast.Attribute) and own_attribute(target, own) is None
