"""Recorders of memory and of operations that are switched on and never off (PA510)."""

import ast
import re
from collections.abc import Iterator

from auditor.source.lifetime.code import Code, calls_in, last_name, short, text_of, within
from auditor.source.lifetime.models import backward_calls, steps_in
from auditor.source.lifetime.sighting import Kind, Sighting

_PROFILERS = re.compile(r"^torch\.(?:profiler|autograd\.profiler|autograd\.profiler_legacy)\.profile$")
_FEW = 100  # turns of a loop that a profiler may well watch whole
HISTORY, STARTED, WHOLE_LOOP = "history", "started", "whole loop"


def recordings(code: Code) -> Iterator[Sighting]:
    yield from _history(code)
    yield from _started(code)
    yield from _whole_loops(code)


def _history(code: Code) -> Iterator[Sighting]:
    calls = code.calls.get("_record_memory_history", [])
    if any(_is_off(call) for call in calls):
        return
    for call in calls:
        if not any(keyword.arg in ("max_entries", "trace_alloc_max_entries") for keyword in call.keywords):
            yield code.sighting(Kind.RECORDING_ON, call, short(call.func), "", HISTORY)


def _is_off(call: ast.Call) -> bool:
    """Off, or possibly: `enabled=flag` is decided elsewhere."""
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "enabled")]
    return any(not (isinstance(value, ast.Constant) and value.value) for value in given)


def _started(code: Code) -> Iterator[Sighting]:
    """`self.profiler.start()` in a file that never stops it."""
    made = {
        text_of(target).rpartition(".")[2]
        for call in code.calls.get("profile", ())
        if _is_profiler(code, call) and isinstance(statement := code.statement(call), ast.Assign)
        for target in statement.targets
    }
    for opening, closing in (("start", "stop"), ("__enter__", "__exit__")):
        ended = {_owner(call) for call in code.calls.get(closing, ())}
        for call in code.calls.get(opening, ()):
            if _owner(call) in made and _owner(call) not in ended:
                yield code.sighting(
                    Kind.RECORDING_ON, call, short(call.func).removesuffix(f".{opening}"), "", STARTED
                )


def _owner(call: ast.Call) -> str:
    """`profiler` of `self.profiler.start()`"""
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _is_profiler(code: Code, call: ast.Call) -> bool:
    head, _, rest = text_of(call.func).partition(".")
    full = code.origins.get(head, head) + (f".{rest}" if rest else "")
    return bool(_PROFILERS.match(full))


def _whole_loops(code: Code) -> Iterator[Sighting]:
    """`with profile():` around training, without a schedule that lets go of what was recorded."""
    for call in code.calls.get("profile", ()):
        item = code.parents.get(call)
        block = code.parents.get(item) if isinstance(item, ast.withitem) else None
        if not isinstance(block, ast.With | ast.AsyncWith) or not _is_profiler(code, call):
            continue
        if any(keyword.arg in ("schedule", None) for keyword in call.keywords):
            continue
        if any(_is_long(node) for node in within(*block.body)):
            yield code.sighting(Kind.RECORDING_ON, call, short(call.func), "", WHOLE_LOOP)


def _is_long(node: ast.AST) -> bool:
    """A loop that trains and whose end is neither near nor reached by a break."""
    if not isinstance(node, ast.For | ast.AsyncFor | ast.While):
        return False
    if not any(True for _ in backward_calls(*node.body)) and not steps_in(*node.body):
        return False
    if any(isinstance(each, ast.Break) for each in within(*node.body)):
        return False
    header = node.test if isinstance(node, ast.While) else node.iter
    return not any(_ends_soon(call) for call in calls_in(header))


def _ends_soon(call: ast.Call) -> bool:
    """`range(10)`, `islice(loader, steps)`"""
    if last_name(call.func) == "islice":
        return True
    numbers = [each.value for each in call.args if isinstance(each, ast.Constant)]
    return last_name(call.func) == "range" and any(isinstance(n, int) and n <= _FEW for n in numbers)
