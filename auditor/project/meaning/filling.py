"""Calls of functions that leave a lease in one of their arguments, or make what lends when gone over."""

import ast
from collections.abc import Iterable, Mapping

from auditor.flow.effects import Position, Value
from auditor.flow.operands import operands
from auditor.flow.places import spelled_out
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Call, Constant, Fresh, Make, Path, is_temporary
from auditor.project.code.bindings import told_by_position
from auditor.project.code.calls import Calls, is_bound, parameter_for
from auditor.project.code.candidates import ITERATORS
from auditor.project.code.makers import made_for_it
from auditor.project.code.modules import Class, Function
from auditor.project.code.named_twice import names_of_object
from auditor.project.meaning.source import Source


def is_owed_here(function: Function, target: Function, call: ast.Call, source: Source) -> bool:
    """The argument is an object that this function made, or was given itself and may be told to fill."""
    bound = is_bound(target, call)
    given: list[tuple[Position, ast.expr]] = list(enumerate(call.args))
    given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
    for position, value in given:
        if parameter_for(target, position, bound) == source.into and isinstance(value, ast.Name):
            try:
                graph = function.graph
            except (TooLarge, RecursionError):
                return False
            return value.id in graph.fresh_roots.union(graph.parameters) - {function.owner}
    return False


def is_made_for_it(
    calls: Calls, function: Function, target: Function, call: ast.Call, source: Source
) -> bool:
    """The argument is a record that another function has made for this one."""
    bound = is_bound(target, call)
    return any(
        parameter_for(target, position, bound) == source.into
        and isinstance(value, ast.Name)
        and made_for_it(calls, function, value.id)
        for position, value in told_by_position(call)
    )


def told_of(function: Function, call: Call, path: Path, value: Value) -> tuple[Path, ...]:
    """`alloc([request])` fills the elements of the list it is given; of `take(4)` 4 are owed."""
    if not is_temporary(path):
        return names_of_object(function, path, call.at if value is Value.AMOUNT else None)
    for op in function.graph.ops:
        if isinstance(op, Make) and op.target == path and op.items:
            return tuple(element for _, element in op.items)
        measured = isinstance(op, Constant | Fresh | Call) and op.target == path
        named = isinstance(op, Constant) and isinstance(op.value, str)  # `windows.open_window("gather")`
        if measured and (value is Value.AMOUNT or named) and (place := spelled_out(op)):
            return (place,)
    return (path,)


def given_as(targets: Iterable[Function], call: Call, argument: Position) -> Path | None:
    """What the call gives for this parameter, by its name or by its place, however the taker counts it."""
    for target in targets:
        bound = is_bound(target, call.at)
        name = parameter_for(target, argument, bound)
        for position, path in operands(call):
            if position != -1 and name is not None and parameter_for(target, position, bound) == name:
                return path
    if isinstance(argument, int):
        if argument < len(call.args):
            return call.args[argument][0]
        return call.kwargs[0][1] if call.args == () and argument == 0 and call.kwargs else None
    return next((path for name, path in call.kwargs if name == argument), None)


def places_in_argument(
    targets: tuple[Function, ...], function: Function, call: Call, source: Source
) -> tuple[Path, ...]:
    """Where in the caller's words it lies."""
    return tuple(
        (*path, *source.rest)
        for target in targets
        for position, path in operands(call)
        if parameter_for(target, position, is_bound(target, call.at)) == source.into
    )[:1]


def lent_in_turns(lineage: Iterable[Class], lending: Mapping[Function, Source]) -> Source | None:
    """`for buffer in Staged(pool, parts)`, whose `__iter__` lends one after the other."""
    for cls in lineage:
        for name in ITERATORS & cls.methods.keys():
            return lending.get(cls.methods[name])
    return None
