"""Callers that tell a method the same in every round of a loop: `for _ in range(n): mirror.save(weights)`.
What they end behind the loop is the last round's."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import awaited
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.pool_state import MUTATORS
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor, ast.While)
ASKING = frozenset({"items", "keys", "values", "parameters", "named_parameters", "buffers", "named_buffers",
                    "modules", "named_modules", "state_dict", "detach", "cpu", "list", "tuple", "dict",
                    "sorted", "range", "len", "enumerate", "zip"})  # fmt: skip
"""What answers the same in each round; `self.queue.get()` does not."""


def comes_after_all_rounds(caller: Function, told: Sequence[ast.Call], end: ast.Call) -> bool:
    """`end` is not called before the next round's call of any of those that the caller makes."""
    return all(
        any(end.lineno > (loop.end_lineno or loop.lineno) for loop in _rounds(caller, call)) for call in told
    )


def _rounds(caller: Function, call: ast.Call) -> Iterator[ast.stmt]:
    """Loops each round of which makes the call, with the same arguments, and goes on."""
    for loop in caller.statements:
        if not isinstance(loop, LOOPS) or not any(_makes(each, call) for each in loop.body):
            continue
        inside = list(walk(loop))
        leaves = any(isinstance(node, ast.Break | ast.Return | ast.Continue) for node in inside)
        changed = {*_stored(call, inside), *_called_upon(call, inside)}
        if not leaves and not _asks_anew(call) and changed.isdisjoint(_read(call)):
            yield loop


def _makes(statement: ast.stmt, call: ast.Call) -> bool:
    """`off.save(weights)` by itself, or `row = await off.save(weights)`."""
    return isinstance(statement, ast.Expr | ast.Assign) and call is awaited(statement.value)


def _asks_anew(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    inner = (node for each in (call.func, *given) for node in walk(each))
    return any(isinstance(node, ast.Call) and last_name(node) not in ASKING for node in inner)


def _stored(call: ast.Call, inside: Sequence[ast.AST]) -> set[str]:
    """What the loop gives other values to; names of a comprehension in the call are its own."""
    own = {id(node) for node in walk(call)}
    return {
        ast.unparse(node)
        for node in inside
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and id(node) not in own
    }


def _called_upon(call: ast.Call, inside: Sequence[ast.AST]) -> Iterator[str]:
    """What else the loop does with the same object may end what is there, `off.turn()`, and so may
    `pending.pop()` tell the next round another thing."""
    own = {id(node) for node in walk(call)}
    for node in inside:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in own:
            upon = ast.unparse(node.func.value)
            if upon == ast.unparse(getattr(call.func, "value", call.func)) or node.func.attr in MUTATORS:
                yield upon


def _read(call: ast.Call) -> set[str]:
    return {
        ast.unparse(node) for node in walk(call) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
    }


def passes_over_the_end(caller: Function, name: str, ending: Set[str]) -> bool:
    """`for layer in layers: field.prime(k)`, then `if layer.is_local: continue`, and only behind that
    `field.consume(q)`: the next round primes it again."""
    for loop in caller.statements:
        if not isinstance(loop, LOOPS):
            continue
        filled = passed = False
        for statement in loop.body:
            called = {last_name(call) for call in walk(statement) if isinstance(call, ast.Call)}
            if passed and not called.isdisjoint(ending):
                return True
            goes_on = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue)
            passed = passed or (filled and goes_on and called.isdisjoint(ending))
            filled = filled or (isinstance(statement, ast.Expr) and name in called)
    return False


def only_fills_the_empty(caller: Function, name: str, field: str) -> bool:
    """`if self.slot is None: self.rearm()`, of what others ask to be armed again: that caller sees to the
    first time, and to no other."""
    reads = {
        id(node)
        for node in caller.own_nodes
        if isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.ctx, ast.Load)
    }
    for node in caller.own_nodes:
        if isinstance(node, ast.If) and name in _called_in(node.body):
            match node.test:
                case (
                    ast.Compare(left=asked, ops=[ast.Is()], comparators=[ast.Constant(value=None)])
                    | ast.UnaryOp(op=ast.Not(), operand=asked)
                ):
                    reads.discard(id(asked))
    return not reads


def _called_in(body: Sequence[ast.stmt]) -> set[str]:
    return {last_name(part) for each in body for part in walk(each) if isinstance(part, ast.Call)}
