"""Methods that ask another way to take until it says yes, or once, and answer what that answers:

    async def reserve_wait(self, n):                async def activate(self, name):
        while not self.reserve(n):                      async with self._loading:
            await self._changed.wait()                      return await self._activate(name)

Whoever comes out of there has what `reserve(n)` gives."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.bindings import awaited, own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk


def with_waiting(pair: Pair, cls: Class) -> Pair:
    """The pair with those methods of its class that ask for one of its halves so, and are told the same."""
    known = {half.function for half in (*pair.acquires, *pair.releases)}
    more = [
        replace(half, function=method)
        for half in pair.acquires
        if half.handle is not Handle.RESULT and half.function.cls is cls
        for _, method in sorted(cls.methods.items())
        if method not in known and f"self.{half.function.name}(" in method.text and _waits(method, half)
    ]
    return replace(pair, acquires=(*pair.acquires, *more)) if more else pair


def _waits(method: Function, half: Half) -> bool:
    told = own_parameters(half.function)
    answers = [each.value for each in method.statements if isinstance(each, ast.Return) and each.value]
    handing_on = (awaited(value) for value in answers if not isinstance(value, ast.Constant))
    asking = list(handing_on) if answers else list(_asked_again(method))
    return (
        bool(asking)
        and own_parameters(method)[: len(told)] == told
        and (all if answers else any)(_asks(call, half, method) for call in asking)
    )


def _asks(call: ast.expr, half: Half, method: Function) -> bool:
    """For the half, and tells it what the method is told."""
    told = own_parameters(half.function)
    return (
        isinstance(call, ast.Call)
        and own_attribute(call.func, method.owner or "") == half.function.name
        and len(call.args) >= min(1, len(told))
        and all(
            isinstance(arg, ast.Name) and arg.id == name for arg, name in zip(call.args, told, strict=False)
        )
    )


def _asked_again(method: Function) -> Iterator[ast.Call]:
    """`while not self.reserve(n):`, which no `break` or `return` leaves."""
    for loop in method.statements:
        match loop:
            case ast.While(test=ast.UnaryOp(op=ast.Not(), operand=asked), body=body):
                call = awaited(asked)
                leaves = (node for each in body for node in walk(each))
                if isinstance(call, ast.Call) and not any(
                    isinstance(node, ast.Break | ast.Return | ast.Raise) for node in leaves
                ):
                    yield call
