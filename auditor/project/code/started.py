"""Functions that are handed to a thread, a task or an executor together with what they are to work on."""

import ast
from collections.abc import Set

from auditor.flow.effects import Position
from auditor.ir.ops import Call, Path
from auditor.project.code.bindings import given_to, told_by_position
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function, last_part

DIRECTLY = {"spawn": 0, "spawn_n": 0, "submit": 0, "start_soon": 0, "call_soon": 0, "call_soon_threadsafe": 0,
            "call_later": 1, "spawn_later": 1, "spawn_after": 1, "run_in_executor": 1, "to_thread": 0,
            "deferToThread": 0, "callInThread": 0}  # fmt: skip
"""Calls that take a function and then its arguments, with the function's position."""

TASKS = frozenset({"create_task", "ensure_future", "run_coroutine_threadsafe", "spawn", "gather"})
"""Calls that run a coroutine which was made of its function's call."""

AS_A_TUPLE = {"start_new_thread": 0, "Timer": 1, "apply_async": 0}
NAMED = {"Thread": "target", "Process": "target"}
"""Calls that take a function, and its arguments together as one tuple."""

WHEN_DONE = frozenset({"add_done_callback"})
"""Methods that are given what is to be called once, whatever came of the work."""


def started(
    model: ClassModel, function: Function, call: Call, position: Position, rest: Path
) -> tuple[Function, str, Path] | None:
    """The function of the project that will work on the operand, the parameter it gets it as, and where in
    that the lease lies; None where that cannot be told."""
    found = _called_when_done(function, call) or _runs(call) or _passed_through(model, function, call)
    if found is None:
        return None
    callee, first = found
    target = model.callee(function, callee)
    if not isinstance(target, Function) or target.is_abstract:
        return None
    named, below = (position, rest) if first is not None else (_key(position, rest), rest[1:])
    if isinstance(named, str):
        return (target, named, below) if named in target.parameters else None
    if first is not None and isinstance(position, int):
        index, inner = position - first, rest
    elif first is None and rest and rest[0][1:-1].isdigit():
        index, inner = int(rest[0][1:-1]), rest[1:]
    else:
        return None
    bound = target.is_method and not target.is_static and isinstance(callee, ast.Attribute)
    index += bound
    if not 0 <= index < len(target.parameters):
        return None
    return target, target.parameters[index], inner


def _key(position: Position, rest: Path) -> str | None:
    """`slot` of `Thread(target=self.work, kwargs={"slot": slot})`."""
    key = rest[0] if position == "kwargs" and rest else ""
    return key[2:-2] if key.startswith(("['", '["')) else None


def as_a_task(
    model: ClassModel, function: Function, call: Call, position: Position
) -> tuple[Function, str] | None:
    """Of `create_task(self.serve(slot))`, and of `self.spawn(self.serve(slot))` where that does no more than
    such a call, the coroutine, and the parameter by which it gets the operand."""
    target = model.callee(function, call.at.func)
    if not isinstance(target, Function) or not isinstance(target.node, ast.AsyncFunctionDef):
        return None
    if not any(_makes_a_task(model, function, each, call.at) for each in function.calls):
        return None
    parameter = parameter_for(target, position, is_bound(target, call.at))
    return (target, parameter) if parameter is not None else None


def _makes_a_task(model: ClassModel, function: Function, around: ast.Call, coroutine: ast.Call) -> bool:
    """It is one that does, or `def spawn(self, work): task = create_task(work)`, and is told the coroutine,
    by whatever name."""
    told = [
        position
        for position, given in told_by_position(around)
        if given is coroutine or (isinstance(given, ast.Name) and coroutine in given_to(function, given.id))
    ]
    if not told or last_part(around.func) in TASKS:
        return bool(told)
    helper = model.callee(function, around.func)
    if not isinstance(helper, Function):
        return False
    names = {parameter_for(helper, position, is_bound(helper, around)) for position in told}
    return any(_runs_it(node, names) for node in helper.nodes)


def _runs_it(node: ast.AST, names: Set[str | None]) -> bool:
    match node:
        case ast.Await(value=ast.Name(id=name)):
            return name in names
        case ast.Call(func=func, args=args):
            return last_part(func) in TASKS and any(getattr(each, "id", None) in names for each in args)
    return False


def _passed_through(model: ClassModel, function: Function, call: Call) -> tuple[ast.expr, int] | None:
    """`self.work` of `self.run(self.work, slot)`, where `def run(self, work, *told)` leaves both to
    `self.executor.submit(work, *told)`."""
    helper = model.callee(function, call.at.func)
    rest = helper.node.args.vararg if isinstance(helper, Function) and hasattr(helper.node, "args") else None
    if not isinstance(helper, Function) or rest is None:
        return None
    own = is_bound(helper, call.at)
    first = len(helper.parameters) - own
    if not helper.parameters[own:] or len(call.at.args) < first:
        return None
    work = helper.parameters[-1]
    if not any(_has_it_done(each, work, rest.arg) for each in helper.of_kind(ast.Call)):
        return None
    return call.at.args[first - 1], first


def _has_it_done(call: ast.Call, work: str, rest: str) -> bool:
    """`submit(work, *told)`, `Thread(target=work, args=told)`, `work(*told)`"""
    named = [getattr(each, "id", None) for each in (call.func, *call.args)]
    named += [getattr(each.value, "id", None) for each in call.keywords]
    starred = any(
        isinstance(each, ast.Starred) and getattr(each.value, "id", None) == rest for each in call.args
    )
    return work in named and (starred or rest in named)


def _called_when_done(function: Function, call: Call) -> tuple[ast.expr, int] | None:
    """`self._sent` of `future.add_done_callback(partial(self._sent, buffer))`."""
    if call.method != "partial" or not call.at.args or isinstance(call.at.args[0], ast.Starred):
        return None
    told = any(last_part(each.func) in WHEN_DONE and call.at in each.args for each in function.calls)
    return (call.at.args[0], 1) if told else None


def _runs(call: Call) -> tuple[ast.expr, int | None] | None:
    """The function that is passed, and the position of its first argument unless they come as a tuple."""
    at = DIRECTLY.get(call.method)
    if at is not None:
        given = call.at.args[: at + 1]
        plain = len(given) > at and not any(isinstance(each, ast.Starred) for each in given)
        return (given[at], at + 1) if plain else None
    if call.method in NAMED:
        passed = [keyword.value for keyword in call.at.keywords if keyword.arg == NAMED[call.method]]
        return (passed[0], None) if passed else None
    at = AS_A_TUPLE.get(call.method)
    return (call.at.args[at], None) if at is not None and len(call.at.args) > at else None
