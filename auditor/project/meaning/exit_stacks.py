"""`contextlib.ExitStack` in a local name: what is put on it is given back where it ends, unless `pop_all` has
taken that away by then."""

import ast

from auditor.flow.effects import BORROWED, RELEASED, TAKEN, Position, Treatment
from auditor.flow.indirect import ON_EXIT
from auditor.ir.ops import Call, Capture, Enter, Move, Path
from auditor.project.code.bindings import is_dropped
from auditor.project.code.modules import Function

MAKING = frozenset({"ExitStack", "AsyncExitStack"})
ENDING = frozenset({"close", "aclose", "__exit__", "__aexit__"})
CONTEXTS = frozenset({"enter_context", "enter_async_context"})
PUTTING = CONTEXTS | {"callback", "push_async_callback", "push", "push_async_exit"}


def stacks_of(function: Function) -> frozenset[Path]:
    """The local names of stacks made here, but for those that nested functions use."""
    made: set[Path] = set()
    shared: set[str] = set()
    for op in function.graph.ops:
        match op:
            case Call(method=method, target=target) if method in MAKING:
                made.add(target)
            case Move(target=(_,) as name, source=source) | Enter(target=(_,) as name, context=source):
                if source in made:
                    made.add(name)
            case Capture(names=names):
                shared.update(names)
    return frozenset(path for path in made if path[0] not in shared)


def put_on(call: Call, stacks: frozenset[Path]) -> Treatment:
    """The stack holds what it is told to give back."""
    if call.receiver is not None and call.receiver in stacks:
        return Treatment(moved_to=(*call.receiver, ON_EXIT))
    return TAKEN


def held_by_stack(function: Function, call: Call, position: Position) -> Treatment:
    """What becomes of a lease on the stack that this call is given. Stacks that are moved or handed on are
    whose they come to."""
    if position != -1:
        return TAKEN
    if call.method == "pop_all":
        return _moved_on(function, call)
    return RELEASED if call.method in ENDING else BORROWED


def _moved_on(function: Function, call: Call) -> Treatment:
    """`stack.pop_all()` for nobody loses all that lies there; returned, it is its callers'."""
    if is_dropped(function, call.at):
        return Treatment(leaves=True)
    if any(isinstance(each, ast.Return) and each.value is call.at for each in function.statements):
        return Treatment(result=(ON_EXIT,), leaves=True)
    return TAKEN
