"""What a loop does on every turn for nothing: emptying the allocator's cache (PA511), tracking gradients that
nobody asks for (PA512).
"""

import ast
import re
from collections.abc import Iterator

from auditor.source.lifetime import grad_mode
from auditor.source.lifetime.code import (
    LOOPS,
    Code,
    Function,
    Loop,
    calls_in,
    last_name,
    place,
    short,
    targets_of,
    text_of,
    within,
)
from auditor.source.lifetime.models import backward_calls, is_model, steps_in
from auditor.source.lifetime.sighting import Kind, Sighting
from auditor.source.nodes import children

_STEP = re.compile(r"^(?:training_step|train_step|_train_step|step|forward)$")
_DATA = re.compile(r"loader|dataset|batches|batch_iter|dataiter|data_iter", re.I)
_NO_REASON = re.compile(r"is_available\(\)|device|cuda|use_gpu", re.I)
TRAINING, PREDICTING = "training", "predicting"


def caches_emptied(code: Code) -> Iterator[Sighting]:
    for call in code.calls.get("empty_cache", ()):
        function = code.function_of(call)
        if function is None or "mlx" in text_of(call.func):
            continue
        loops = code.loops_around(call)
        how = _turn(code, loops[0], function) if loops else _one_step(code, function)
        until: ast.AST = loops[0] if loops else function
        if how and not _for_a_reason(code, call, until):
            yield code.sighting(Kind.CACHE_EMPTIED, call, short(call.func), "", how)


def _turn(code: Code, loop: Loop, function: Function) -> str | None:
    """Whether a turn of the loop is one step of training, or one batch."""
    direct = _of_this_turn(loop)
    if any(True for _ in backward_calls(*direct)) or steps_in(*direct):
        return TRAINING
    header = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else loop.test
    runs = any(is_model(code, call.func, function) for call in calls_in(*loop.body))
    return PREDICTING if runs and _DATA.search(ast.unparse(header)) else None


def _of_this_turn(loop: Loop) -> list[ast.AST]:
    """The nodes of the body without those of inner loops, which have turns of their own."""
    waiting: list[ast.AST] = list(loop.body)
    found: list[ast.AST] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, LOOPS):
            continue
        if isinstance(node, ast.stmt) and any(isinstance(each, LOOPS) for each in within(node)):
            waiting += children(node)
        else:
            found.append(node)
    return found


def _one_step(code: Code, function: Function) -> str | None:
    """A method that is one step: its caller has the loop."""
    if not (_STEP.match(function.name) and code.method_class(function)):
        return None
    return TRAINING if any(True for _ in backward_calls(function)) else None


def _for_a_reason(code: Code, call: ast.Call, until: ast.AST) -> bool:
    """Under a condition of the program's own, in a handler, or in a cleanup."""
    below: ast.AST = call
    for parent in code.above(call):
        if parent is until:
            return False
        if isinstance(parent, ast.If) and not _NO_REASON.search(ast.unparse(parent.test)):
            return True
        if isinstance(parent, ast.ExceptHandler) or (
            isinstance(parent, ast.Try) and below in parent.finalbody
        ):
            return True
        below = parent
    return False


def gradients_on(code: Code) -> Iterator[Sighting]:
    for function in _functions_with_eval(code):
        in_eval = _put_in_eval(code, function)
        frozen = _frozen(function)
        for name, since in sorted(in_eval.items()):
            call = _run_in_loop(code, function, name, since)
            if call is not None and name not in frozen and not grad_mode.off(code, call):
                yield code.sighting(Kind.GRADIENTS_ON, call, name)


def _functions_with_eval(code: Code) -> list[Function]:
    """Those that put something into evaluation, and the methods of a class whose constructor does."""
    found: dict[Function, None] = {}
    for call in code.calls.get("eval", ()):
        function = code.function_of(call)
        owner = code.method_class(function) if function is not None else None
        if function is not None:
            found[function] = None
        if function is not None and owner is not None and function.name == "__init__":
            found.update((each, None) for each in owner.body if isinstance(each, Function))
    return sorted(found, key=place)


def _put_in_eval(code: Code, function: Function) -> dict[str, tuple[int, int]]:
    """What is called `.eval()` on, in the function or in its class's constructor, and from where on."""
    found: dict[str, tuple[int, int]] = {}
    for call in calls_in(function):
        if last_name(call.func) == "eval" and isinstance(call.func, ast.Attribute) and not call.args:
            found.setdefault(text_of(call.func.value), place(call))
    owner = code.method_class(function)
    constructor = (
        next((n for n in owner.body if isinstance(n, Function) and n.name == "__init__"), None)
        if owner
        else None
    )
    if constructor is not None and constructor is not function:
        for call in calls_in(constructor):
            if last_name(call.func) == "eval" and isinstance(call.func, ast.Attribute):
                found.setdefault(text_of(call.func.value), (0, 0))
    return {name: since for name, since in found.items() if name != "self"}


def _frozen(function: Function) -> set[str]:
    """Models whose parameters were told to need no gradient."""
    return {
        text_of(call.func.value)
        for call in calls_in(function)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("requires_grad_", "freeze", "half_frozen")
    }


def _run_in_loop(code: Code, function: Function, name: str, since: tuple[int, int]) -> ast.Call | None:
    """The first call of the model in a loop after it was put into evaluation, if nobody wants gradients."""
    for call in sorted(calls_in(function), key=place):
        if text_of(call.func) != name or place(call) < since or _is_for_nothing(code, call):
            continue
        loops = code.loops_around(call)
        loop = next((each for each in loops if place(each) > since), None)
        if loop is None or _trains_again(function, name, since, call) or _wants_gradients(loop):
            continue
        return call
    return None


def _is_for_nothing(code: Code, call: ast.Call) -> bool:
    """`_ = model(x)`, `model(x)`: a rehearsal, whose graph is gone at once."""
    parent = code.parents[call]
    targets = targets_of(parent) if isinstance(parent, ast.Assign) else []
    return isinstance(parent, ast.Expr) or (bool(targets) and all(text_of(each) == "_" for each in targets))


def _trains_again(function: Function, name: str, since: tuple[int, int], call: ast.Call) -> bool:
    return any(
        last_name(each.func) == "train"
        and text_of(each.func) == f"{name}.train"
        and since < place(each) < place(call)
        for each in calls_in(function)
    )


def _wants_gradients(loop: Loop) -> bool:
    """Whether the loop goes back, differentiates, or asks an input for its gradient."""
    if any(True for _ in backward_calls(*loop.body)) or steps_in(*loop.body):
        return True
    for node in within(*loop.body):
        if isinstance(node, ast.Attribute) and node.attr in (
            "grad",
            "requires_grad",
            "requires_grad_",
            "jacobian",
            "vjp",
            "jvp",
        ):
            return True
    return False
