"""Leases whose end is seen to where they begin: by the context's exit, by work that is put off, by memory."""

import ast
from collections.abc import Iterable

from auditor.project.code.entered import ENTERS, EXITS
from auditor.project.code.modules import Function, last_part
from auditor.protocols.vocabulary import ACQUIRE_WORDS, RELEASE_WORDS, pairs_with, take_apart
from auditor.source.nodes import walk

IN_MEMORY = frozenset({"BytesIO", "StringIO"})
LATER = frozenset({"Thread", "Timer", "call_later", "call_at", "submit", "start_new_thread"})
"""Calls that take a function which is run after this one."""


def ends_by_itself(acquire: ast.Call, function: Function) -> bool:
    """Nobody who calls this function is left with something to give back."""
    return (
        over_memory(acquire)
        or _ended_by_its_exit(acquire, function)
        or _ended_later_on(acquire, function)
        or _put_over_a_broken_pipe(acquire, function)
    )


def over_memory(acquire: ast.Call) -> bool:
    """`Image.open(BytesIO(data))`: there is no file behind it."""
    given = [*acquire.args[:1], *(keyword.value for keyword in acquire.keywords)]
    return any(
        isinstance(each, ast.Call) and bool(each.args) and last_part(each.func) in IN_MEMORY for each in given
    )


def _ended_by_its_exit(acquire: ast.Call, function: Function) -> bool:
    """`self.acquire()` in `__enter__`, `self.release()` in `__exit__`."""
    if function.cls is None or function.name not in ENTERS:
        return False
    exits = (method for method in function.cls.methods.values() if method.name in EXITS)
    return any(_ends(acquire, function, method.calls, method) for method in exits)


def _ended_later_on(acquire: ast.Call, function: Function) -> bool:
    """`Timer(seconds, self.release).start()`, or a thread over a method that calls `self.release()`."""
    for call in function.calls:
        if last_part(call.func) not in LATER:
            continue
        for passed in (*call.args, *(keyword.value for keyword in call.keywords)):
            match passed:
                case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == function.owner:
                    target = function.cls.methods.get(attr) if function.cls is not None else None
                    if _pairs(acquire, attr):
                        return _is_own(acquire, function)
                    if target is not None and _ends(acquire, function, target.calls, target):
                        return True
    return False


def _put_over_a_broken_pipe(acquire: ast.Call, function: Function) -> bool:
    """Python's own advice for `except BrokenPipeError`: what opens the null device and puts it over the
    standard output, so that nothing is flushed into the pipe, has nothing else left to do."""
    handlers = (node for node in function.nodes if isinstance(node, ast.ExceptHandler))
    return any(
        isinstance(handler.type, ast.Name)
        and handler.type.id == "BrokenPipeError"
        and any(node is acquire for node in walk(handler))
        and any(isinstance(node, ast.Call) and last_part(node.func) == "dup2" for node in walk(handler))
        for handler in handlers
    )


def _ends(acquire: ast.Call, function: Function, calls: Iterable[ast.Call], method: Function) -> bool:
    """Whether one of the calls gives back, on the method's own object, what was acquired on this one's."""
    return _is_own(acquire, function) and any(
        _is_own(call, method) and _pairs(acquire, last_part(call.func)) for call in calls
    )


def _is_own(call: ast.Call, function: Function) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=name)):
            return name == function.owner
    return False


def _pairs(acquire: ast.Call, releasing: str) -> bool:
    taken = take_apart(last_part(acquire.func), ACQUIRE_WORDS)
    given = take_apart(releasing, RELEASE_WORDS)
    return taken is not None and given is not None and pairs_with(taken, given)
