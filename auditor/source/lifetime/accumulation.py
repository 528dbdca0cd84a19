"""Losses and outputs that are summed or collected with their graph still attached (PA501)."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.source.lifetime import grad_mode
from auditor.source.lifetime.attachment import carriers
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
from auditor.source.lifetime.models import backward_calls, is_loss, is_model, loss_of, steps_in
from auditor.source.lifetime.sighting import Kind, Sighting

_EVALUATES = re.compile(r"^_*(?:eval|valid|test|predict)", re.I)
_DRAINS = frozenset(("clear", "pop", "popleft", "popitem"))
AFTER_BACKWARD, IN_EVALUATION = "after backward", "in evaluation"


@dataclass(frozen=True, slots=True)
class _Site:
    """A statement that adds `value` to what is kept under `keeper`."""

    node: ast.stmt
    keeper: ast.expr
    value: ast.expr


def graphs_kept(code: Code) -> Iterator[Sighting]:
    by_function: dict[Function, list[_Site]] = {}
    for site in _sites(code):
        if (function := code.function_of(site.node)) is not None:
            by_function.setdefault(function, []).append(site)
    for function, sites in by_function.items():
        backwards = list(backward_calls(function))
        judge = _after_backward if backwards else _in_evaluation
        kept = [(site, found) for site in sites if (found := judge(code, function, site, backwards))]
        fed = _fed_to_backward(function, backwards) if kept else ()
        for site, found in kept:
            if _root(site.keeper) not in fed and not grad_mode.off(code, site.node):
                yield found


def _sites(code: Code) -> Iterator[_Site]:
    for node in code.of(ast.AugAssign, ast.Assign):
        match node:
            case ast.AugAssign(target=target, op=ast.Add(), value=value):
                yield _Site(node, target, value)
            case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add(), right=right)):
                if type(left) is type(target) and text_of(left) == text_of(target):
                    yield _Site(node, target, right)
    for call in code.calls.get("append", ()):
        statement = code.parents[call]
        match call:
            case ast.Call(func=ast.Attribute(value=kept), args=[value]) if isinstance(statement, ast.Expr):
                yield _Site(statement, kept, value)


def _after_backward(
    code: Code, function: Function, site: _Site, backwards: list[ast.Call]
) -> Sighting | None:
    """The loss that this turn goes back from, or a part of it, is added to what outlives the turn."""
    for carrier in carriers(site.value):
        for call in backwards:
            turn = _turn(code, function, site, call)
            if turn is None or not _outlives(code, function, site, turn):
                continue
            if text_of(carrier) in _parts(turn, call) and _still_attached(turn, carrier, call, site):
                return code.sighting(
                    Kind.GRAPH_KEPT,
                    site.node,
                    short(carrier),
                    short(site.keeper),
                    AFTER_BACKWARD,
                    [(call, "backward frees what the graph saved, not its nodes")],
                )
    return None


def _turn(code: Code, function: Function, site: _Site, call: ast.Call) -> Loop | Function | None:
    """The innermost loop around both; a method that adds to a field is a turn of its caller's loop."""
    around = code.loops_around(call)
    for loop in code.loops_around(site.node):
        if loop in around:
            return loop
    if not code.loops_around(site.node) and not around and text_of(site.keeper).startswith("self."):
        return function
    return None


def _outlives(code: Code, function: Function, site: _Site, turn: Loop | Function) -> bool:
    """Whether what is kept is neither made, emptied nor limited within the turn, nor gone back from."""
    root = _root(site.keeper)
    if assigned(turn.body, root, plainly=True) and site.node not in assigned(turn.body, root, plainly=True):
        return False
    if any(len(assigned([s], root, plainly=True)) for s in turn.body if site.node not in list(within(s))):
        return False
    if _drained([*turn.body], root) or _bounded(code, root):
        return False
    return isinstance(turn, ast.For | ast.AsyncFor | ast.While) or not _reset_elsewhere(code, function, root)


def _root(keeper: ast.expr) -> str:
    while isinstance(keeper, ast.Subscript | ast.Call):
        keeper = keeper.value if isinstance(keeper, ast.Subscript) else keeper.func
    return text_of(keeper)


def _drained(roots: list[ast.stmt], text: str) -> bool:
    for node in within(*roots):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _DRAINS and text_of(node.func.value) == text:
                return True
        elif isinstance(node, ast.Delete) and any(_root(target) == text for target in node.targets):
            return True
    return False


def _bounded(code: Code, text: str) -> bool:
    """`deque(maxlen=...)`"""
    name = text.rpartition(".")[2]
    for call in code.calls.get("deque", ()):
        statement = code.statement(call)
        if any(keyword.arg == "maxlen" for keyword in call.keywords) and name in ast.unparse(statement):
            return True
    return False


def _fed_to_backward(function: Function, backwards: list[ast.Call]) -> set[str]:
    """Every name that flows into something that is gone back from, or into `autograd.grad`."""
    known = {text for call in backwards for text in _mentioned(call)}
    for call in calls_in(function):
        if last_name(call.func) == "grad":
            known |= _mentioned(call)
    bindings = [node for node in within(function) if isinstance(node, ast.Assign)]
    while True:
        more = {
            text
            for node in bindings
            if any(text_of(target) in known for target in node.targets)
            for text in _mentioned(node.value)
        }
        if more <= known:
            return known
        known |= more


def _mentioned(node: ast.AST) -> set[str]:
    fields = {text_of(each) for each in within(node) if isinstance(each, ast.Attribute)}
    return names_in(node) | fields


def _reset_elsewhere(code: Code, function: Function, text: str) -> bool:
    """Whether other code of the file empties the field or binds it anew, `__init__` left out."""
    field, owner = text.removeprefix("self."), code.class_of(function)
    for other in code.functions:
        if other is function or other.name == "__init__":
            continue
        same = code.class_of(other) is owner
        for node in within(other):
            if not isinstance(node, ast.Attribute) or node.attr != field:
                continue
            is_emptied = isinstance(node.ctx, ast.Store | ast.Del) or _is_drain(code, node)
            if is_emptied and (same or text_of(node.value) != "self"):
                return True
    return False


def _is_drain(code: Code, node: ast.Attribute) -> bool:
    """`self.losses.clear()`"""
    method = code.parents[node]
    return (
        isinstance(method, ast.Attribute)
        and method.attr in _DRAINS
        and isinstance(code.parents[method], ast.Call)
    )


def _parts(turn: Loop | Function, call: ast.Call) -> set[str]:
    """What a backward call goes back from, and what was computed into it in the turn."""
    loss = loss_of(call)
    known = {text_of(each) for each in carriers(loss)} if loss is not None else set()
    bindings = [node for node in within(*turn.body) if isinstance(node, ast.Assign)]
    computed = {text_of(t): node.value for node in bindings for t in node.targets}
    known -= {text for text in known & computed.keys() if _is_number(computed[text])}
    for _ in range(len(bindings)):
        more = {
            text
            for name in known & computed.keys()
            for text in _operands(computed[name])
            if isinstance(computed.get(text), ast.Call | ast.BinOp) or "loss" in text.lower()
        }
        if more <= known:
            break
        known |= more
    return known


def _is_number(value: ast.expr) -> bool:
    """Of Python's own, which has no graph: a weight by which a loss is multiplied."""
    match value:
        case ast.Constant():
            return True
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Call(func=ast.Name(id="float" | "int" | "len" | "round")):
            return True
        case ast.Call(func=ast.Name(id="max" | "min" | "abs" | "sum"), args=args):
            return all(map(_is_number, args))
        case ast.Call(func=ast.Attribute(attr="item")):
            return True
    return False


def _operands(value: ast.expr) -> set[str]:
    """The terms of a sum or product of losses; the factors that are settings are sorted out by the caller."""
    return {text_of(each) for each in carriers(value) if not isinstance(each, ast.Call)}


def _still_attached(turn: Loop | Function, carrier: ast.expr, call: ast.Call, site: _Site) -> bool:
    """Whether nothing between the backward call and the site binds the name to something cut off."""
    text = text_of(carrier)
    for node in assigned(turn.body, text):
        if place(call) < place(node) < place(site.node):
            value = getattr(node, "value", None)
            if not isinstance(value, ast.expr) or not list(carriers(value)):
                return False
    return not any(
        last_name(each.func) == "detach_" and text_of(each.func).startswith(f"{text}.")
        for each in calls_in(*turn.body)
    )


def _in_evaluation(code: Code, function: Function, site: _Site, backwards: list[ast.Call]) -> Sighting | None:
    """A loss of a loop that evaluates, where nobody goes back from anything."""
    loops = code.loops_around(site.node)
    if not loops or backwards:  # as at most sites, for which nothing else has to be read
        return None
    evaluates = _EVALUATES.match(function.name) or any(
        last_name(c.func) == "eval" for c in calls_in(function)
    )
    if not evaluates or _trains(function) or not _outlives(code, function, site, loops[0]):
        return None
    runs = [call for call in calls_in(*loops[0].body) if is_model(code, call.func, function)]
    if not runs:
        return None
    for carrier in carriers(site.value):
        if _is_loss_of_this_turn(code, carrier, loops[0], site):
            return code.sighting(
                Kind.GRAPH_KEPT,
                site.node,
                short(carrier),
                short(site.keeper),
                IN_EVALUATION,
                [(runs[0], "run with gradients on")],
            )
    return None


def _trains(function: Function) -> bool:
    """A step, or a backward pass under another name."""
    return steps_in(function) or any(last_name(call.func).endswith("backward") for call in calls_in(function))


def _is_loss_of_this_turn(code: Code, carrier: ast.expr, loop: Loop, site: _Site) -> bool:
    if isinstance(carrier, ast.Call):
        return True
    before = [node for node in assigned(loop.body, text_of(carrier)) if place(node) < place(site.node)]
    if not before:
        return isinstance(carrier, ast.Attribute) and carrier.attr == "loss"
    binding = max(before, key=place)
    value = getattr(binding, "value", None)
    if not (isinstance(value, ast.Call) and is_loss(value.func)) or grad_mode.off(code, binding, 0):
        return False
    return len(targets_of(binding)) == 1 or "loss" in text_of(carrier).lower()
