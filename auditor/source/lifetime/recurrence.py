"""States that are carried from one turn or one call to the next together with their graph (PA502)."""

import ast
import re
from collections.abc import Iterator

from auditor.source.lifetime import grad_mode
from auditor.source.lifetime.code import (
    Code,
    Function,
    Loop,
    assigned,
    calls_in,
    last_name,
    names_in,
    place,
    short,
    targets_of,
    text_of,
    within,
)
from auditor.source.lifetime.sighting import Kind, Sighting

_CELL_NAMES = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_CELLS = re.compile(r"^(?:nn\.|torch\.nn\.)?(?:LSTM|GRU|RNN)(?:Cell)?$")
_STATE = re.compile(
    r"(?:^|_|\.)(?:h|c|hx|cx|hidden|hiddens|state|states|carry|memory|rnn_state)(?:_[a-z0-9]+)?$"
)
_NOT_RECURRENT = frozenset(
    (
        "step",
        "reset",
        "update",
        "apply",
        "to",
        "get",
        "detach",
        "max",
        "min",
        "sum",
        "abs",
        "int",
        "float",
        "len",
    )
)
ON_SELF, IN_LOOP = "on self", "in a loop"


def states_carried(code: Code) -> Iterator[Sighting]:
    cells = [call for name in _CELL_NAMES for call in code.calls.get(name, ())]
    owners = {owner for call in cells if (owner := code.class_of(call)) is not None}
    for each in sorted(owners, key=place):
        yield from _on_self(code, each)
    for name in ("backward", "manual_backward"):
        for call in code.calls.get(name, ()):
            if (function := code.function_of(call)) is not None:
                yield from _through_loop(code, function, call)


def _on_self(code: Code, owner: ast.ClassDef) -> Iterator[Sighting]:
    """`out, self.h = self.rnn(x, self.h)` in a class that never detaches or resets it."""
    methods = [node for node in owner.body if isinstance(node, Function)]
    cells = {
        text_of(target)
        for method in methods
        for node in within(method)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if _CELLS.match(text_of(node.value.func))
        for target in node.targets
    }
    if not cells or _detaches(owner):
        return
    for method in methods:
        for call in calls_in(method):
            if text_of(call.func) in cells and not grad_mode.off(code, call):
                yield from _kept_by(code, owner, method, call)


def _kept_by(code: Code, owner: ast.ClassDef, method: Function, call: ast.Call) -> Iterator[Sighting]:
    given = {
        text_of(node)
        for argument in call.args
        for node in ast.walk(argument)
        if isinstance(node, ast.Attribute)
    }
    bound = {text_of(target) for target in targets_of(code.statement(call))}
    for node in within(method):
        if not isinstance(node, ast.Assign):
            continue
        stored = {text_of(target) for target in targets_of(node)} & given
        from_call = node is code.statement(call) or (
            isinstance(node.value, ast.Name | ast.Tuple) and names_in(node.value) & bound
        )
        for field in sorted(stored):
            if from_call and not _reset(code, owner, method, field, node):
                yield code.sighting(Kind.STATE_CARRIED, node, short(call.func), field, ON_SELF)
                return


def _detaches(owner: ast.ClassDef) -> bool:
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and node.attr in ("detach", "detach_", "data"):
            return True
        if isinstance(node, ast.Call) and re.search(r"detach|repackage", last_name(node.func)):
            return True
    return False


def _reset(code: Code, owner: ast.ClassDef, method: Function, field: str, store: ast.Assign) -> bool:
    """Whether anything but the store, the constructor and a first-time test binds the field."""
    name = field.removeprefix("self.")
    for node in code.of(ast.Attribute):
        if not (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)):
            continue
        function = code.function_of(node)
        if function is method and code.method_class(method) is owner:
            if code.statement(node) is not store and not _first_time(code, node, field):
                return True
        elif text_of(node.value) == "self" and code.class_of(node) is not owner:
            continue
        elif function is None or function.name != "__init__":
            return True
    return False


def _first_time(code: Code, node: ast.AST, field: str) -> bool:
    """`if self.h is None:` around it."""
    return any(isinstance(each, ast.If) and _asks_for_none(each.test, field) for each in code.above(node))


def _asks_for_none(test: ast.expr, field: str) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Is)
        and text_of(test.left) == field
        and isinstance(test.comparators[0], ast.Constant)
    )


def _through_loop(code: Code, function: Function, backward: ast.Call) -> Iterator[Sighting]:
    """`out, h = model(x, h)` in a loop that goes back each turn and never cuts `h` off."""
    loops = code.loops_around(backward)
    if not loops:
        return
    loop = loops[0]
    for node in within(*loop.body):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        for name in sorted(_carried(node, node.value)):
            lives_on = _only_carried(loop, name, node) and _made_before(function, loop, name)
            if lives_on and not grad_mode.off(code, node):
                note = "keeps the graph" if _retains(backward) else "goes back through this turn only"
                callee = short(node.value.func)
                yield code.sighting(Kind.STATE_CARRIED, node, callee, name, IN_LOOP, [(backward, note)])


def _carried(node: ast.Assign, call: ast.Call) -> set[str]:
    if last_name(call.func) in _NOT_RECURRENT:
        return set()
    given = {text_of(argument) for argument in call.args} | {text_of(k.value) for k in call.keywords}
    bound = {text_of(target) for target in targets_of(node)}
    return {name for name in given & bound if _STATE.search(name)}


def _only_carried(loop: Loop, name: str, store: ast.Assign) -> bool:
    """Whether the loop does nothing else with the state: no detaching, no new one, no helper."""
    if assigned(loop.body, name) != [store] or name in {text_of(target) for target in targets_of(loop)}:
        return False
    return not any(_cuts(node) and name in names_in(node) for node in within(*loop.body))


def _cuts(node: ast.AST) -> bool:
    """A simple statement that detaches something."""
    if not isinstance(node, ast.Assign | ast.Expr | ast.AugAssign):
        return False
    return any(
        (isinstance(each, ast.Attribute) and each.attr in ("detach", "detach_", "data"))
        or (isinstance(each, ast.Call) and re.search(r"detach|repackage", last_name(each.func)))
        for each in ast.walk(node)
    )


def _made_before(function: Function, loop: Loop, name: str) -> bool:
    inside = set(within(*loop.body))
    return any(node not in inside for node in assigned([function], name)) or any(
        argument.arg == name for argument in function.args.args
    )


def _retains(call: ast.Call) -> bool:
    return any(keyword.arg == "retain_graph" for keyword in call.keywords)
