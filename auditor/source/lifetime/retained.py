"""Graphs that a backward call in a loop keeps: for a second derivative, or for nobody (PA507)."""

import ast
from collections.abc import Iterator

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
    text_of,
    within,
)
from auditor.source.lifetime.models import backward_calls, loss_of
from auditor.source.lifetime.sighting import Kind, Sighting

_UNATTACHED = frozenset(("len", "int", "float", "to", "detach", "init_hidden", "iter", "next", "tqdm"))
SECOND_ORDER, FOR_NOBODY = "second order", "for nobody"


def graphs_retained(code: Code) -> Iterator[Sighting]:
    for call in sorted(code.calls.get("backward", ()), key=place):
        function = code.function_of(call)
        loops = code.loops_around(call)
        if function is None or not loops:
            continue
        if _is_true(call, "create_graph"):
            if not _gradients_dropped(loops):
                yield code.sighting(Kind.GRAPH_RETAINED, call, _loss(call), "", SECOND_ORDER)
        elif _is_true(call, "retain_graph") and _nobody_uses_it(function, loops[0], call):
            yield code.sighting(Kind.GRAPH_RETAINED, call, _loss(call), "", FOR_NOBODY)


def _loss(call: ast.Call) -> str:
    loss = loss_of(call)
    return short(loss) if loss is not None else ""


def _is_true(call: ast.Call, option: str) -> bool:
    return any(
        k.arg == option and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords
    )


def _gradients_dropped(loops: list[Loop]) -> bool:
    """Whether a turn takes the gradients away, which breaks the cycle between a parameter and its own."""
    for node in within(*loops[-1].body):
        if isinstance(node, ast.Call) and last_name(node.func) in ("zero_grad", "clear_grad"):
            return True
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
            if any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets):
                return True
    return False


def _nobody_uses_it(function: Function, loop: Loop, call: ast.Call) -> bool:
    """Whether the graph was built in this turn, and no other pass of the turn goes through it."""
    others = [each for each in backward_calls(*loop.body) if each is not call]
    others += [
        each for each in calls_in(*loop.body) if last_name(each.func) == "grad" and place(each) > place(call)
    ]
    loss = loss_of(call)
    return not others and loss is not None and _built_here(function, set(within(*loop.body)), loss)


def _built_here(function: Function, inside: set[ast.AST], loss: ast.expr) -> bool:
    """Whether everything that the loss was computed from is this turn's, or no tensor of an outer graph."""
    waiting, seen = names_in(loss), set[str]()
    built = False
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        bindings = [
            node for node in assigned([function], name) if isinstance(node, ast.Assign | ast.AugAssign)
        ]
        here = [node for node in bindings if node in inside]
        if here:
            built = built or any(isinstance(each, ast.Call) for node in here for each in ast.walk(node.value))
            for node in here:
                waiting |= _arguments(node.value)
        elif any(_may_be_attached(node.value) for node in bindings):
            return False
    return built


def _arguments(value: ast.expr) -> set[str]:
    """The names that flow in, without those that are only called: `model(x)` is x's."""
    called = {text_of(each.func).partition(".")[0] for each in ast.walk(value) if isinstance(each, ast.Call)}
    return names_in(value) - called


def _may_be_attached(value: ast.expr) -> bool:
    """`features = encoder(x)`, bound outside of the loop: no constructor, number or fresh tensor."""
    if not isinstance(value, ast.Call):
        return False
    name = last_name(value.func)
    return not (name[:1].isupper() or name in _UNATTACHED or text_of(value.func).startswith("torch."))
