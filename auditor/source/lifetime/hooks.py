"""Hooks that nobody can remove again (PA503), and hooks that hold on to what they hang on (PA509)."""

import ast
import re
from collections.abc import Iterator

from auditor.source.lifetime.code import (
    Code,
    Function,
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

_MODULE_HOOKS = frozenset(
    (
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook", "register_backward_hook",
    )
)  # fmt: skip
_TENSOR_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
_EACH_STEP = re.compile(
    r"^(?:forward|__call__|(?:training|validation|test|train|predict)_step|step|on_\w*batch_start)$"
)
_ONCE = re.compile(
    r"^_*(?:init|setup|set_?up|prepare|build|create|make|wrap|attach|register|install|apply|add|enable|patch|main|train|fit|configure|convert|on_\w*start)"
)
EACH_CALL, BEFORE_A_RUN, EACH_TURN = "each call", "before a run", "each turn"
OF_TENSOR, OF_MODULE = "of the tensor", "of the module"


def hooks_dropped(code: Code) -> Iterator[Sighting]:
    if code.of(ast.Attribute) and any(
        isinstance(node, ast.Attribute)
        and node.attr in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        for node in code.of(ast.Attribute)
    ):
        return  # somebody empties the tables by hand
    for name in sorted(_MODULE_HOOKS | _TENSOR_HOOKS):
        for call in code.calls.get(name, ()):
            function = code.function_of(call)
            if function is None or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            if _is_dropped(code, function, call) and (
                how := _repeated(code, function, call, call.func.value)
            ):
                yield code.sighting(Kind.HOOK_DROPPED, call, short(call.func.value), name, how)


def _is_dropped(code: Code, function: Function, call: ast.Call) -> bool:
    """Whether the handle is bound to no name, or to one that is never read again."""
    parent = code.parents[call]
    if isinstance(parent, ast.Expr):
        return True
    if (
        isinstance(parent, ast.Call)
        and last_name(parent.func) == "append"
        and isinstance(parent.func, ast.Attribute)
    ):
        kept = parent.func.value
        return isinstance(kept, ast.Name) and _reads(function, kept.id) == 1
    if isinstance(parent, ast.Assign) and all(isinstance(target, ast.Name) for target in parent.targets):
        return all(_reads(function, text_of(target)) == 0 for target in parent.targets)
    return False


def _reads(function: Function, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(function)
    )


def _repeated(code: Code, function: Function, call: ast.Call, receiver: ast.expr) -> str | None:
    """How it comes that the hook is registered again on the same thing; None where it is not."""
    root = _root(code, function, receiver, call)
    if root is None or function.name in ("__init__", "__new__", "__post_init__"):
        return None
    is_method = code.method_class(function) is not None
    if _EACH_STEP.match(function.name) and is_method and root.startswith("self."):
        return EACH_CALL if not _behind_a_test(code, function, call) else None
    if last_name(call.func) in _TENSOR_HOOKS:
        return None
    loops = code.loops_around(call)
    if loops and not _depends_on_turn(loops[0], receiver) and _runs(function, root, call):
        return EACH_TURN
    if _ONCE.match(function.name) or _behind_a_test(code, function, call):
        return None
    return BEFORE_A_RUN if _runs(function, root, call) else None


def _root(code: Code, function: Function, receiver: ast.expr, call: ast.Call) -> str | None:
    """The parameter, or the field of self, that the hooked thing belongs to; None if it was made here."""
    text = _base(receiver)
    for _ in range(4):
        if text.startswith("self."):
            own = [node for node in assigned([function], text) if isinstance(node, ast.Assign)]
            return None if own else text
        parameters = {
            each.arg for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        }
        binding = [node for node in assigned([function], text) if place(node) < place(call)]
        if not binding:
            return text if text in parameters else None
        came_from = _origin(binding[-1])
        if came_from is None or came_from == text:
            return None
        text = came_from
    return None


def _origin(node: ast.AST) -> str | None:
    """Where `for m in model.modules()` and `layer = dict(model.named_modules())[name]` take it from."""
    value = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
    return _base(value) if isinstance(value, ast.expr) else None


def _base(node: ast.expr) -> str:
    """`self.model` of `self.model.layers[3].mlp`, `encoder` of `getattr(encoder, name)`."""
    while True:
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                return text_of(node)
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case ast.Call(
                func=ast.Name(id="getattr" | "dict" | "list" | "enumerate" | "reversed"), args=[first, *_]
            ):
                node = first
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if (
                "modules" in name or "children" in name or "layers" in name
            ):
                node = inner
            case ast.Name(id=name):
                return name
            case _:
                return ""


def _depends_on_turn(loop: ast.AST, receiver: ast.expr) -> bool:
    turn = {text_of(target) for target in targets_of(loop)} | {
        text_of(target) for node in within(*getattr(loop, "body", [])) for target in targets_of(node)
    }
    return bool(names_in(receiver) & turn)


def _runs(function: Function, root: str, call: ast.Call) -> bool:
    """Whether the function itself runs the thing after it was hooked."""
    return any(
        text_of(each.func) in (root, f"{root}.forward") and place(each) > place(call)
        for each in calls_in(function)
    )


def _behind_a_test(code: Code, function: Function, call: ast.Call) -> bool:
    for parent in code.above(call):
        if parent is function:
            return False
        if isinstance(parent, ast.If):
            return True
    return False


def hooks_closed(code: Code) -> Iterator[Sighting]:
    for name in sorted(_TENSOR_HOOKS | _MODULE_HOOKS):
        for call in code.calls.get(name, ()):
            function = code.function_of(call)
            if function is None or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            receiver = text_of(call.func.value).removesuffix(".grad_fn")
            closure = _closure(function, call.args[0])
            if closure is None or receiver not in _free(closure):
                continue
            if name in _MODULE_HOOKS and receiver == "self" and code.method_class(function):
                yield code.sighting(Kind.HOOK_CLOSED, call, receiver, name, OF_MODULE)
            elif name in _TENSOR_HOOKS and _is_computed(function, receiver, call):
                yield code.sighting(Kind.HOOK_CLOSED, call, receiver, name, OF_TENSOR)


def _closure(function: Function, hook: ast.expr) -> ast.AST | None:
    """The function that is registered, if it is a lambda or defined right here."""
    if isinstance(hook, ast.Lambda):
        return hook
    if isinstance(hook, ast.Name):
        return next(
            (each for each in ast.walk(function) if isinstance(each, Function) and each.name == hook.id), None
        )
    return None


def _free(closure: ast.AST) -> set[str]:
    """The names that a closure takes from outside: neither its parameters, nor bound or defaulted in it."""
    assert isinstance(closure, Function | ast.Lambda)
    own = {each.arg for each in ast.walk(closure.args) if isinstance(each, ast.arg)}
    body = closure.body if isinstance(closure.body, list) else [closure.body]
    own |= {
        node.id
        for root in body
        for node in ast.walk(root)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names_in(*body) - own


def _is_computed(function: Function, name: str, call: ast.Call) -> bool:
    """Whether the tensor is the result of an operation: only then does its hook hang on its graph."""
    before = [node for node in assigned([function], name) if place(node) < place(call)]
    if not before:
        return False
    value = getattr(max(before, key=place), "value", None)
    if isinstance(value, ast.Call):
        text = text_of(value)
        return not re.search(
            r"Parameter\(|requires_grad|\.detach\(|torch\.(?:tensor|zeros|ones|randn|rand|empty)\(", text
        )
    return isinstance(value, ast.BinOp | ast.Subscript)
