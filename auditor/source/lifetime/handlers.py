"""Exceptions that keep the frames of a failed step alive: stored, or still caught while the step is tried
again (PA505).
"""

import ast
import builtins
import re
from collections.abc import Iterator

from auditor.source.lifetime.code import Code, Function, calls_in, last_name, short, text_of, within
from auditor.source.lifetime.models import backward_calls, is_model
from auditor.source.lifetime.sighting import Kind, Sighting

_OOM = re.compile(r"OutOfMemoryError|\bOOM")
_SAYS_OOM = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC|is_(?:\w+_)?(?:oom|out_of_memory)\w*|should_reduce_batch_size",
    re.I,
)
_RUNS = re.compile(r"(?:^|_)(?:run|fit|train|forward|generate)(?:_|$)")
_RELEASED = re.compile(r"clear_frames|__traceback__|with_traceback\(None\)|['\"]cpu['\"]|\.cpu\(")
# Calls into C have no Python frame of their own: what failed in them holds nothing.
_NO_FRAME = re.compile(r"^(?:torch|np|numpy|math|os|time|gc|logging|logger|log|warnings|sys|dist|psutil)\.")
_BUILT_IN = frozenset(dir(builtins))
_METHODS_OF_TENSORS = frozenset(
    (
        "to", "cuda", "cpu", "size", "append", "extend", "item", "format", "join", "empty_cache",
        "zero_grad", "view", "get", "info", "warning", "chunk", "split", "pop", "items", "keys", "values",
        "update", "error", "debug", "startswith", "lower", "strip", "add", "write", "clear", "detach",
        "contiguous", "numel", "copy_", "backward", "eval", "train", "synchronize", "step", "reshape",
    )
)  # fmt: skip
RETRIED, KEPT = "retried in the handler", "kept"


def exceptions_held(code: Code) -> Iterator[Sighting]:
    for node in code.of(ast.Try):
        assert isinstance(node, ast.Try)
        function = code.function_of(node)
        if function is None:
            continue
        for handler in node.handlers:
            if _RELEASED.search(ast.unparse(handler)):
                continue
            if _is_out_of_memory(handler):
                yield from _retried(code, function, node, handler)
            yield from _kept(code, function, node, handler)


def _is_out_of_memory(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else ""
    return bool(_OOM.search(caught)) or bool(_SAYS_OOM.search(ast.unparse(handler)))


def _retried(code: Code, function: Function, node: ast.Try, handler: ast.ExceptHandler) -> Iterator[Sighting]:
    work = _until_it_ran(node.body)
    tried = {text_of(call.func) for call in calls_in(*work) if _has_frame(call)}
    tried |= {function.name, f"self.{function.name}"}
    for call in sorted(calls_in(*handler.body), key=lambda each: (each.lineno, each.col_offset)):
        if text_of(call.func) in tried and _has_frame(call) and (call.args or call.keywords):
            step = (node.body[0], "fails here; the exception holds its frames until the handler ends")
            yield code.sighting(
                Kind.EXCEPTION_HELD, call, short(call.func), handler.name or "", RETRIED, [step]
            )
            return


def _until_it_ran(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a try up to a bare `run_loop(...)`: that is what fails, and what follows is done on
    success."""
    for number, statement in enumerate(body):
        match statement:
            case ast.Expr(value=ast.Call() as call) if _RUNS.search(last_name(call.func)) and _has_frame(
                call
            ):
                return body[: number + 1]
    return body


def _has_frame(call: ast.Call) -> bool:
    text = text_of(call.func)
    if text in _BUILT_IN or _NO_FRAME.search(text) or "(" in text:
        return False
    return last_name(call.func) not in _METHODS_OF_TENSORS


def _kept(code: Code, function: Function, node: ast.Try, handler: ast.ExceptHandler) -> Iterator[Sighting]:
    """The exception itself put on self or into a container, where the failed body ran a network."""
    if handler.name is None or not _ran_a_network(code, function, node, handler):
        return
    for each in within(*handler.body):
        keeper = _keeper(each, handler.name)
        if keeper is not None:
            assert isinstance(each, ast.stmt)
            yield code.sighting(Kind.EXCEPTION_HELD, each, handler.name, short(keeper), KEPT)


def _ran_a_network(code: Code, function: Function, node: ast.Try, handler: ast.ExceptHandler) -> bool:
    if _is_out_of_memory(handler) or any(True for _ in backward_calls(*node.body)):
        return True
    return any(is_model(code, call.func, function) for call in calls_in(*node.body))


def _keeper(node: ast.AST, name: str) -> ast.expr | None:
    """What a statement stores the bare exception in, if that outlives the function."""
    match node:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target], value=value):
            return target if _holds(value, name) else None
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=kept, attr="append"), args=[value])):
            return kept if _holds(value, name) else None
    return None


def _holds(value: ast.expr, name: str) -> bool:
    match value:
        case ast.Name(id=found):
            return found == name
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
            return any(_holds(part, name) for part in parts)
    return False
