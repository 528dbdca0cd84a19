"""Leases that a piece of work is told of, which the same object may cancel:

    self.futures[rid] = self.executor.submit(self._run, rid, slot)

    def cancel(self, rid):
        self.futures.pop(rid).cancel()

What waits in the line of an executor never runs once it is cancelled, whatever it would do in the end; a task
that has begun ends at its `await`, and gives back what it does in a `finally`."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, awaited, given_to, gone_through, own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.code.release_names import is_an_end
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.name_bindings import FILLING
from auditor.source.nodes import walk

TASKS = frozenset({"create_task", "ensure_future"})
STARTING = TASKS | {"submit"}


def cancelled_with_it(
    function: Function, calls: Calls, acquire: ast.Call, holder: str, ends: Set[str]
) -> Iterator[ast.Call]:
    """The calls that cancel it, in methods that give nothing back. `holder` is the name of the lease."""
    work = _work_told_of(function, acquire, holder)
    if work is None or function.cls is None or _is_heard_of(function):
        return
    field, started = work
    if last_name(started) in TASKS and _sees_to_it(function, calls, started, ends):
        return
    for method in function.cls.methods.values():
        if any(is_an_end(call, ends) for call in method.calls):
            continue
        for call in method.calls:
            if _cancels(method, call, field) and not _asks_whether(method, call):
                yield call


def _work_told_of(function: Function, acquire: ast.Call, holder: str) -> tuple[str, ast.Call] | None:
    """The field that has the future or the task, and the call that made it."""
    for started in function.calls:
        if last_name(started) not in STARTING:
            continue
        told = (node for arg in started.args for node in walk(arg))
        if not any(node is acquire or (holder and getattr(node, "id", "") == holder) for node in told):
            continue
        field = next(_keeping(function, started), None)
        return (field, started) if field is not None else None
    return None


def _keeping(function: Function, started: ast.Call) -> Iterator[str]:
    """`self.futures[rid] = ...`, `self.futures.append(...)`, of the call itself or of what it was named."""
    own = function.owner or ""
    given = list(assignments(function))
    names = {to.id for to, value in given if isinstance(to, ast.Name) and awaited(value) is started}
    stored = [(to, value) for to, value in given if not isinstance(to, ast.Name)]
    stored += [
        (call.func.value, arg)
        for call in function.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in FILLING
        for arg in call.args
    ]
    for to, value in stored:
        table = to.value if isinstance(to, ast.Subscript) else to
        if value is started or (isinstance(value, ast.Name) and value.id in names):
            field = own_attribute(table, own)
            if field is not None:
                yield field


def _is_heard_of(function: Function) -> bool:
    return any(last_name(call) == "add_done_callback" for call in function.calls)


def _sees_to_it(function: Function, calls: Calls, started: ast.Call, ends: Set[str]) -> bool:
    """The coroutine gives back in a `finally`, or leaves that to a `with` or somebody else."""
    for made in (arg for arg in started.args if isinstance(arg, ast.Call)):
        for target in calls.targets(function, made)[0]:
            plain = any(is_an_end(call, ends) for call in target.calls)
            guarded = any(isinstance(node, ast.Try | ast.With | ast.AsyncWith) for node in target.statements)
            if plain and not guarded:
                return False
    return True


def _cancels(method: Function, call: ast.Call, field: str) -> bool:
    """`self.futures.pop(rid).cancel()`, `future.cancel()` of one that comes from there."""
    if last_name(call) != "cancel" or not isinstance(call.func, ast.Attribute):
        return False
    whom = call.func.value
    sources = [whom]
    if isinstance(whom, ast.Name):
        sources += [*given_to(method, whom.id), *gone_through(method, whom.id)]
    return any(
        own_attribute(node, method.owner or "") == field
        for source in sources
        for node in walk(source)
        if isinstance(node, ast.Attribute)
    )


def _asks_whether(method: Function, call: ast.Call) -> bool:
    """`if future.cancel():`, `return future.cancel()`: it is told whether the work had begun."""
    return not any(isinstance(node, ast.Expr) and node.value is call for node in method.statements)
