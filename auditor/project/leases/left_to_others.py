"""Leases left to a function that runs later, a callback or a task, which gives them back on some of its ways:
`fut.add_done_callback(partial(self._done, buf))`, `channel.post(region, self._sent)`,
`create_task(self._run(req))` with `req.permit`."""

import ast
from collections.abc import Iterator, Set
from dataclasses import replace

from auditor.flow.effects import Acquisition, Handle
from auditor.flow.follow import EDGES, follow_given
from auditor.flow.knowledge import NOTHING
from auditor.flow.lease import Leak, Loss
from auditor.flow.limits import TooManyStates
from auditor.flow.trace import span_of
from auditor.ir.graph import Graph, TooLarge
from auditor.ir.ops import Leave, Path, Way
from auditor.model import Step
from auditor.project.code.bindings import own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function
from auditor.project.code.started import TASKS, WHEN_DONE
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import EffectsOf
from auditor.project.outcome import Outcome, loses_normally
from auditor.source.nodes import walk

CALLED_WHEN_DONE = WHEN_DONE | {"add_callback", "on_done", "then", "on_complete"}


def lost_by_who_has_it(outcome: Outcome, model: ClassModel, effects_of: EffectsOf, ends: Set[str]) -> Outcome:
    """With the way out of that function on which it keeps the lease, where it is told of nobody else."""
    lease, acquisition = outcome.lease, outcome.acquisition
    unlike = acquisition.handle is not Handle.RESULT or acquisition.declared
    if unlike or loses_normally(lease) or outcome.function.cls is None:
        return outcome
    for method, place in _given_to(outcome, model, ends):
        if not _asked_of_fields(method).isdisjoint(_asked_of_fields(outcome.function)):
            continue  # who leaves it to the method has asked what that will ask
        kept = next(_ways_that_keep(method, place, acquisition, effects_of), None)
        if kept is not None:
            return replace(outcome, lease=replace(lease, leaks=(*lease.leaks, _leak(outcome, method, kept))))
    return outcome


def _asked_of_fields(function: Function) -> set[str]:
    """`cancelled` of `if letter.cancelled:`"""
    tests = (node.test for node in function.statements if isinstance(node, ast.If | ast.While))
    return {part.attr for test in tests for part in walk(test) if isinstance(part, ast.Attribute)}


def _given_to(outcome: Outcome, model: ClassModel, ends: Set[str]) -> Iterator[tuple[Function, Path]]:
    """Methods of the same object that run later, and where in what they are told the lease lies."""
    function, holder = outcome.function, outcome.lease.holder
    for call in function.calls:
        for given in call.args:
            match given:
                case ast.Attribute() if (method := _own(given, function, model)) is not None:
                    if last_name(call) in CALLED_WHEN_DONE:
                        yield from _in_what_is_done(method, ends)
                    elif any(getattr(each, "id", None) == holder for each in call.args):
                        yield from ((method, (name,)) for name in _ended_as_told(method, ends))
                case ast.Call(func=ast.Name(id="partial"), args=[ast.Attribute() as called, *bound]):
                    if (method := _own(called, function, model)) is not None:
                        yield from _told(method, bound, {holder: ()})
                        if last_name(call) in CALLED_WHEN_DONE:
                            yield from _in_what_is_done(method, ends)
                case ast.Call(func=ast.Attribute() as called) if last_name(call) in TASKS:
                    method = _own(called, function, model)
                    lies = {holder: ()} | {path[0]: path[1:] for _, path in outcome.stored}
                    yield from _told(method, given.args, lies) if method is not None else ()


def _own(node: ast.Attribute, function: Function, model: ClassModel) -> Function | None:
    """`self._done`, of this function's object."""
    name = own_attribute(node, function.owner or "")
    return model.method(function.cls, name) if name is not None and function.cls is not None else None


def _told(method: Function, given: list[ast.expr], lies: dict[str, Path]) -> Iterator[tuple[Function, Path]]:
    for parameter, each in zip(method.parameters[1:], given, strict=False):
        if isinstance(each, ast.Name) and each.id in lies:
            yield method, (parameter, *lies[each.id])


def _in_what_is_done(method: Function, ends: Set[str]) -> Iterator[tuple[Function, Path]]:
    """A callback is told last what is done, which may have the lease."""
    if method.parameters[1:]:
        told = method.parameters[-1]
        yield from ((method, (told, field)) for field in _fields_ended(method, told, ends))


def _fields_ended(method: Function, told: str, ends: Set[str]) -> Iterator[str]:
    """`.buf` of `self.pool.put(work.buf)`"""
    for call in method.calls:
        for given in call.args if last_name(call) in ends else ():
            if isinstance(given, ast.Attribute) and getattr(given.value, "id", None) == told:
                yield f".{given.attr}"


def _ended_as_told(method: Function, ends: Set[str]) -> Iterator[str]:
    for call in method.calls:
        for given in call.args if last_name(call) in ends else ():
            if isinstance(given, ast.Name) and given.id in method.parameters[1:]:
                yield given.id


def _ways_that_keep(
    method: Function, place: Path, acquisition: Acquisition, effects_of: EffectsOf
) -> Iterator[ast.AST]:
    """Ordinary ways out of it, beside one on which it gives the lease back."""
    given = Acquisition(acquisition.protocol, Handle.RESULT, acquisition.value, (place,), "")
    try:
        graph: Graph = method.graph
        followed = follow_given(graph, effects_of(method), given, NOTHING, EDGES["none"])
    except (TooLarge, TooManyStates, RecursionError):
        return
    endings = followed.endings
    if not endings.released or endings.unknown or endings.taken:
        return
    if any(path != place for path in endings.stored.values()):
        return
    for node, states in followed.solution.states.items():
        op = graph.ops[node]
        if isinstance(op, Leave) and op.way is not Way.RAISE and any(place in held.places for held in states):
            yield op.at


def _leak(outcome: Outcome, method: Function, at: ast.AST) -> Leak:
    function = outcome.function
    first = span_of(function.module.path, outcome.call, function.module.lines)
    last = span_of(method.module.path, at, method.module.lines)
    steps = (
        Step(first.path, first.line, first.column, "acquired here"),
        Step(last.path, last.line, last.column, LAST_WORDS[Loss.RETURN]),
    )
    return Leak(Loss.RETURN, last, outcome.lease.holder, steps)
