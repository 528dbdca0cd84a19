"""Turns of a loop that end by `continue` or `break` after something was counted, pinned or charged for them,
where the rest of the turn would have noted it, handed it on or given it back: `block.pin(); if block.key in
self.seen: continue; self.held.append(block)`.

What is marked may be anybody's to end, but here the function has shown who is told of it: on this way
nobody."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import names_bound, root_of
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import names_in
from auditor.project.leases.ended_by_closures import ended_by_closures
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor, ast.While)

LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)

HANDING_OVER = frozenset(
    {"submit", "put", "put_nowait", "create_task", "ensure_future", "start_soon", "send"}
)
"""Calls after which somebody else ends what was counted without a name, `self.gate.acquire()`."""


def skipped_turn(function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.Continue | ast.Break]:
    """The statements that leave it behind. `ends` are the names of what gives back."""
    told = {root_of(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))}
    told |= {name for each in call.args for name in names_in(each)}
    if isinstance(call.func, ast.Attribute) and not told:
        told = {root_of(call.func.value)}
    told -= {function.owner, ""}
    told |= {name for each in told for name in ended_by_closures(function, each, ends)}
    for loop in _around(function, call):
        for suite in _turn(loop, call):
            for out in _skipping(suite, call, told, ends):
                if isinstance(out, ast.Continue) or not _is_read_behind(function, loop, told):
                    yield out
        over = getattr(loop, "iter", None)
        if over is not None and told & set(names_bound(loop)):
            told = {*told, *names_in(over)} - {function.owner}


def _around(function: Function, call: ast.Call) -> list[ast.For | ast.AsyncFor | ast.While]:
    """Loops, the innermost first."""
    loops = [node for node in function.statements if isinstance(node, LOOPS) and _contains(node.body, call)]
    return sorted(loops, key=lambda loop: -loop.lineno)


def _turn(loop: ast.For | ast.AsyncFor | ast.While, call: ast.Call) -> Iterator[list[ast.stmt]]:
    """The statements of a turn from the call on: those of the loop, or of `if pool.take(n):` in it."""
    for number, statement in enumerate(loop.body):
        if not _contains([statement], call):
            continue
        if isinstance(statement, ast.If) and _is_granted(statement.test, call):
            yield [statement, *statement.body]
        elif not _leaves_with_it(statement, call):
            yield loop.body[number:]


def _leaves_with_it(statement: ast.stmt, call: ast.Call) -> bool:
    """`if block is not None: block.pin(); continue`: what comes below is for others."""
    for node in walk(statement):
        for suite in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(suite, list) and _contains(suite, call) and isinstance(suite[-1], LEAVING):
                return True
    return False


def _is_granted(test: ast.expr, call: ast.Call) -> bool:
    """`if pool.take(n):`, as against `if not pool.take(n): continue`"""
    denied = (each for node in walk(test) if isinstance(node, ast.UnaryOp) for each in walk(node))
    return all(each is not call for each in denied) and any(each is call for each in walk(test))


def _is_read_behind(function: Function, loop: ast.stmt, told: Set[str]) -> bool:
    """What a loop was left with by `break` may be seen to there."""
    last = loop.end_lineno or loop.lineno
    return any(
        isinstance(node, ast.Name) and node.id in told and node.lineno > last for node in function.nodes
    )


def _skipping(
    suite: Sequence[ast.stmt], call: ast.Call, told: Set[str], ends: Set[str]
) -> Iterator[ast.Continue | ast.Break]:
    first, *later = suite
    answers = set(names_bound(first))
    for number, statement in enumerate(later):
        if not isinstance(statement, ast.If) or statement.orelse:
            continue
        if not isinstance(out := statement.body[-1], ast.Continue | ast.Break) or answers & names_in(
            statement.test
        ):
            continue
        if not _sees_to_it(statement.body, told, ends) and _sees_to_it(later[number + 1 :], told, ends):
            yield out


def _sees_to_it(statements: Sequence[ast.stmt], told: Set[str], ends: Set[str]) -> bool:
    """It gives back, or puts what was told somewhere, or hands it on."""
    for node in (node for each in statements for node in walk(each)):
        if isinstance(node, ast.Call):
            name = last_name(node)
            operands = [*node.args, *(keyword.value for keyword in node.keywords)]
            given = {each for operand in operands for each in names_in(operand)}
            if name in ends or (name not in LOGGING and given & told):
                return True
            if not told and name in HANDING_OVER:
                return True
        elif isinstance(node, ast.Assign) and told & names_in(node.value) and _stores(node):
            return True
    return False


def _stores(node: ast.Assign) -> bool:
    """`req.node, req.rows = match.node, rows` as well."""
    places = [part for each in node.targets for part in getattr(each, "elts", [each])]
    return any(isinstance(each, ast.Attribute | ast.Subscript) for each in places)


def _contains(statements: Sequence[ast.stmt], call: ast.Call) -> bool:
    return any(node is call for each in statements for node in walk(each))
