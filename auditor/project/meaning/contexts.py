"""Context managers of the tree that lend, entered without a `with`: whoever enters them leaves them."""

import ast
from collections.abc import Iterable, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import given_to
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.project.meaning.exit_stacks import CONTEXTS, MAKING
from auditor.project.meaning.opener import Opener
from auditor.project.pools.bodies import returns_something

BY_HAND = frozenset({"__enter__", "__aenter__"})
ENTERING = CONTEXTS | BY_HAND


def words_of(lending: Set[Function]) -> set[str]:
    """Names of calls by which somebody may come to owe the end of one of them."""
    return {*ENTERING, *(function.name for function in lending)} if lending else set()


def entered_by_hand(
    calls: Calls, lending: Set[Function], function: Function, call: ast.Call
) -> Handle | None:
    """What is owed an end: the first stack that this function made and enters one on, or one that it made
    and enters by its method. A stack under a `with` is ended by that."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=stack), attr=way), args=[ast.Call() as made]) if (
            way in CONTEXTS
        ):
            owed = _is_made_here(function, stack) and call is _first_on(function, stack)
            entered = _entered(calls, lending, function, made) is not None
            return Handle.RECEIVER if owed and (entered or _lends(calls, lending, function, made)) else None
    names = {
        each.func.value.id
        for each in function.calls
        if isinstance(each.func, ast.Attribute)
        and each.func.attr in BY_HAND
        and isinstance(each.func.value, ast.Name)
    }
    held = any(call is given for name in names for given in given_to(function, name))
    return Handle.RESULT if held and _lends(calls, lending, function, call) else None


def _lends(calls: Calls, lending: Set[Function], function: Function, made: ast.Call) -> bool:
    targets = calls.targets(function, made)[0]
    return bool(targets) and all(target in lending for target in targets)


def says_when_entered(
    calls: Calls, lending: Set[Function], function: Function, call: ast.Call
) -> frozenset[tuple[str, bool]]:
    """`seat = stack.enter_context(Seat(seats))` is not None where a seat was taken."""
    made = call.args[0] if call.args else None
    enter = _entered(calls, lending, function, made) if isinstance(made, ast.Call) else None
    answers = enter is not None and returns_something(enter)
    return frozenset({(" is None", False)}) if answers else frozenset()


def entering_methods(openers: Iterable[Opener]) -> frozenset[Function]:
    """Those of the classes whose objects hold something as soon as they are entered."""
    return frozenset(
        each.cls.methods[name]
        for each in openers
        for name in each.opening & BY_HAND
        if name in each.cls.methods
    )


def _entered(calls: Calls, lending: Set[Function], function: Function, made: ast.Call) -> Function | None:
    """The method that takes something when what is made there is entered."""
    constructed = calls.targets(function, made)[1]
    if constructed is None:
        return None
    methods = (calls.model.method(constructed, name) for name in sorted(BY_HAND))
    return next((method for method in methods if method in lending), None)


def _is_made_here(function: Function, stack: str) -> bool:
    given = list(given_to(function, stack))
    return bool(given) and all(
        isinstance(each, ast.Call) and last_part(each.func) in MAKING for each in given
    )


def _first_on(function: Function, stack: str) -> ast.Call:
    entering = (
        each
        for each in function.calls
        if isinstance(each.func, ast.Attribute)
        and each.func.attr in CONTEXTS
        and getattr(each.func.value, "id", None) == stack
    )
    return min(entering, key=lambda each: (each.lineno, each.col_offset))
