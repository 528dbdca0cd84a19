"""Permits that are left with a task of which nobody hears when it is over:

    await self.permits.acquire()
    task = asyncio.create_task(self._encode(text))
    self.tasks.add(task)
    task.add_done_callback(self.tasks.discard)

The set keeps the task alive, and the callback takes it out again. Where neither the task nor anything that is
noted here knows of the permit, it never comes back."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.held import Endings
from auditor.flow.lease import EXCEPTIONAL, Leak
from auditor.project.code.bindings import assignments
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import is_an_end
from auditor.project.leases.given_back_at_times import OTHERS
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.name_bindings import FILLING
from auditor.source.nodes import walk

STARTING = frozenset({"create_task", "ensure_future", "start_soon", "spawn"})
FORGETTING = frozenset({"discard", "remove"})


def left_with_a_task(
    function: Function, calls: Calls, acquire: ast.Call, endings: Endings, leaks: tuple[Leak, ...],
    ends: Set[str],
) -> tuple[Leak, ...]:  # fmt: skip
    """The losses behind the line where the task is started. `ends` are the names of what gives back."""
    started = dict(_tasks(function))
    if not started or endings.released or any(getattr(endings, each) for each in OTHERS):
        return ()
    if any(is_an_end(call, ends) for call in function.calls) or _mentions(function, ends):
        return ()
    if _notes_something(function, acquire, set(started)):
        return ()
    if not all(_knows_nothing(calls, function, made, ends) for made in started.values()):
        return ()
    first = min(made.lineno for made in started.values())
    return tuple(leak for leak in leaks if leak.loss not in EXCEPTIONAL and leak.at.line >= first)


def _tasks(function: Function) -> Iterator[tuple[str, ast.Call]]:
    """Names of tasks that are only taken out of a set when they are over, and the calls that they run."""
    forgetting = {
        call.func.value.id
        for call in function.calls
        if last_name(call) == "add_done_callback"
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.args
        and last_part(call.args[0]) in FORGETTING
    }
    for target, value in assignments(function):
        match target, value:
            case ast.Name(id=name), ast.Call(func=func, args=[ast.Call() as made, *_]) if (
                last_part(func) in STARTING and name in forgetting
            ):
                yield name, made


def _mentions(function: Function, ends: Set[str]) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in ends for node in walk(function.node))


def _notes_something(function: Function, acquire: ast.Call, tasks: Set[str]) -> bool:
    """Behind the acquire anything but the task is put somewhere, or another callback is told."""
    fields = [each for each, _ in assignments(function) if not isinstance(each, ast.Name)]
    if any(each.lineno > acquire.lineno for each in fields):
        return True
    for call in function.calls:
        told = {each.id for each in call.args if isinstance(each, ast.Name)}
        asked = call.func.value if isinstance(call.func, ast.Attribute) else None
        of_task = isinstance(asked, ast.Name) and asked.id in tasks
        if of_task and not (call.args and last_part(call.args[0]) in FORGETTING):
            return True
        if told & tasks and last_name(call) not in FILLING:
            return True
        filled = last_name(call) in FILLING and call.lineno > acquire.lineno
        if filled and not told <= tasks:
            return True
    return False


def _knows_nothing(calls: Calls, function: Function, made: ast.Call, ends: Set[str]) -> bool:
    """What the task runs is not told of this object, and nothing that it calls here looks like an end."""
    targets = calls.targets(function, made)[0]
    told = {each.id for each in made.args if isinstance(each, ast.Name)}
    if function.owner in told or not targets:
        return False
    return not any(
        is_an_end(call, ends)
        for target in targets
        for each in (target, *(inner for call in target.calls for inner in calls.targets(target, call)[0]))
        for call in each.calls
    )
