"""Acquire calls, function by function, with the nodes of the flow graph that stand for them."""

import ast
from collections.abc import Iterator

from auditor.ir.ops import Call, Next
from auditor.project.code.bindings import is_dropped
from auditor.project.code.candidates import wild_pattern
from auditor.project.code.modules import Function, Module, last_part
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.source import Source


def functions_with(module: Module, words: set[str]) -> Iterator[tuple[Function, list[ast.Call]]]:
    """Functions that make calls with one of these last names (`*` allowed), with those calls in source
    order."""
    wild = wild_pattern(words)

    def wanted(name: str) -> bool:
        return name in words or (wild is not None and wild.fullmatch(name) is not None)

    for function in module.functions_at(line for line, name in module.called if wanted(name)):
        calls = [call for call in function.calls if wanted(last_name(call))]
        if calls:
            yield function, calls


def last_name(call: ast.Call) -> str:
    return last_part(call.func)


def site_nodes(function: Function, call: ast.Call) -> list[int]:
    """A call in a `finally` body stands at several nodes."""
    return [index for index, op in enumerate(function.graph.ops) if isinstance(op, Call) and op.at is call]


Loop = ast.For | ast.AsyncFor | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def loops_around(function: Function, at: ast.AST) -> frozenset[int]:
    """The heads of the loops, comprehensions included, that an expression or statement stands in; what a loop
    goes over, and its `else`, stand outside."""
    targets: set[int] = set()
    for loop in function.nodes:
        if isinstance(loop, Loop) and isinstance(at, (ast.expr, ast.stmt)) and _within(loop, at):
            targets |= {id(target) for target in _targets_around(loop, at)}
    return frozenset(
        index for index, op in enumerate(function.graph.ops) if isinstance(op, Next) and id(op.at) in targets
    )


def _targets_around(loop: Loop, at: ast.expr | ast.stmt) -> Iterator[ast.expr]:
    """Of a loop, or of each level of a comprehension, around what it holds."""
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        outside: list[ast.expr | ast.stmt] = [loop.iter, *loop.orelse]
        if not any(_within(part, at) for part in outside):
            yield loop.target
        return
    for generator in loop.generators:
        if _within(generator.iter, at):
            return
        yield generator.target


def _within(outer: ast.stmt | ast.expr, inner: ast.stmt | ast.expr) -> bool:
    start, end = (outer.lineno, outer.col_offset), (outer.end_lineno or 0, outer.end_col_offset or 0)
    return start <= (inner.lineno, inner.col_offset) < end


def acquires(
    recogniser: Recogniser, function: Function, calls: list[ast.Call]
) -> list[tuple[ast.Call, Source]]:
    found: list[tuple[ast.Call, Source]] = []
    for call in () if function.runs_on_device else calls:
        source = recogniser.source(function, call)
        if source is not None and not _stands_for_a_stream(function, call):
            found.append((call, source))
    return found


def _stands_for_a_stream(function: Function, call: ast.Call) -> bool:
    """`os.close(0)`, `os.open(os.devnull, os.O_RDWR)` of a daemon: that gets the lowest descriptor."""
    opened = call.args[:1] if ast.unparse(call.func) == "os.open" else []
    null = any(ast.unparse(each) in ("os.devnull", "'/dev/null'") for each in opened)
    return null and is_dropped(function, call)
