"""Where in a call's result the lease lies. Whether what an `accept()` returns is ever taken apart: a socket's
is a pair, others' is one thing."""

import ast
import re

from auditor.ir.ops import Call, Move, Path, Unpack
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import spellings
from auditor.project.code.modules import Function
from auditor.project.meaning.releases import callee_text
from auditor.protocols.result_parts import FIRST_OF_TWO

SOCKETS = re.compile(r"sock|listener|\bs\.", re.IGNORECASE)


def in_result(model: ClassModel, function: Function, call: Call, rest: Path, *too: Path) -> tuple[Path, ...]:
    """By every name that it has there."""
    if rest == FIRST_OF_TWO and call.method == "accept" and _never_parted(function, call):
        return (call.target,)
    made = model.type_of(function, call.at) if rest else None
    spelt = [each for place in (rest, *too) for each in spellings(model, made, place)]
    return tuple(call.target + each for each in dict.fromkeys(spelt))


def _never_parted(function: Function, call: Call) -> bool:
    """What other libraries accept is the connection alone: `client = listener.accept()`, and never an item of
    it."""
    ops = function.graph.ops
    names = {op.target[0] for op in ops if isinstance(op, Move) and op.source == call.target}
    if SOCKETS.search(callee_text(call.at)):
        return False  # a socket's is a pair, whoever takes it apart
    if not names or any(name.startswith(("%", "@")) for name in names):
        return False
    if any(isinstance(op, Unpack) and op.source[0] in names for op in ops):
        return False
    subscripts = (node.value for node in function.nodes if isinstance(node, ast.Subscript))
    return not any(isinstance(value, ast.Name) and value.id in names for value in subscripts)
