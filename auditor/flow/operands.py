"""What a call is given, and as what."""

from auditor.flow.effects import Position
from auditor.ir.ops import Call, Path

PROCESS_POSITION = "<process>"
"""Stands for the operand of calls that end what the whole process holds."""


def operands(call: Call) -> list[tuple[Position, Path]]:
    """Everything a call is given, with its position; starred operands stand for their elements."""
    given: list[tuple[Position, Path]] = []
    if call.receiver is not None:
        given.append((-1, call.receiver))
    elif call.callee is not None:
        given.append((-1, call.callee))
    for index, (path, starred) in enumerate(call.args):
        given.append((index, (*path, "[*]") if starred else path))
    for name, path in call.kwargs:
        given.append((name, path) if name is not None else (len(given), (*path, "[*]")))
    return given
