"""Whether autograd is off where a node stands: by a block, a decorator, or by everybody who calls."""

import ast

from auditor.source.lifetime.code import Code, Function, last_name, text_of

_OFF = ("no_grad", "inference_mode")
_CALLERS_OF_CALLERS = 2


def off(code: Code, node: ast.AST, depth: int = _CALLERS_OF_CALLERS) -> bool:
    """`no_grad` or `inference_mode` around the node, on its function, or around every call of that function
    in the file.
    """
    if _off_for_the_file(code):
        return True
    outermost: Function | None = None
    for parent in code.above(node):
        if isinstance(parent, ast.With | ast.AsyncWith):
            if any(_switches_off(item.context_expr) for item in parent.items):
                return True
        elif isinstance(parent, Function):
            outermost = outermost or parent
            if any(_switches_off(decorator) for decorator in parent.decorator_list):
                return True
    return outermost is not None and depth > 0 and _off_for_callers(code, outermost, depth)


def _off_for_callers(code: Code, function: Function, depth: int) -> bool:
    calls = [call for call in code.calls.get(function.name, ()) if code.function_of(call) is not function]
    return bool(calls) and all(off(code, call, depth - 1) for call in calls)


def _off_for_the_file(code: Code) -> bool:
    """`torch.set_grad_enabled(False)` as a statement, or a `no_grad` that somebody enters by hand."""
    for call in code.calls.get("set_grad_enabled", ()):
        if _switches_off(call) and isinstance(code.parents.get(call), ast.Expr):
            return True
    return any(_switches_off(call.func) for call in code.calls.get("__enter__", ()))


def _switches_off(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and last_name(node.func) == "set_grad_enabled":
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(not (isinstance(value, ast.Constant) and value.value is True) for value in given)
    text = text_of(node)
    return any(word in text for word in _OFF)
