"""What a call is given, and as what; what other operations read."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Position
from auditor.flow.places import OWN_ENDS
from auditor.ir.ops import (
    Await,
    Call,
    Capture,
    Delete,
    Enter,
    Exit,
    Fresh,
    InPlace,
    Lookup,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    Yield,
)

PROCESS_POSITION = "<process>"
"""Stands for the operand of calls that end what the whole process holds."""

KEEPING = frozenset({"append", "appendleft", "add", "add_done_callback"})
"""Calls that keep a function for whoever calls it."""


def keeps_its_end(call: Call, position: Position, operand: Path) -> bool:
    """`self.on_done.append(handle.close)`: whoever calls what is there ends the handle."""
    return position != -1 and len(operand) > 1 and operand[-1] in OWN_ENDS and call.method in KEEPING


def tells_of(call: Call, place: Path) -> bool:
    """`net.put(lane, rank, x)` and `table.put(key, x)` are told by it of what they keep, and do not keep it
    itself, as `queue.put(request, False)` does."""
    told = [path for path, starred in call.args if not starred]
    switches = (isinstance(each, ast.Constant) for each in call.at.args[1:])
    several = len(told) > 1 and not any(switches)
    return several and place in (told if len(told) > 2 else told[:1])


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


def uses(op: Op) -> Iterator[Path]:
    """What an operation reads."""
    match op:
        case Call():
            yield from (path for _, path in operands(op))
        case Move(source=source) | Await(source=source) | Unpack(source=source) | Store(source=source):
            yield source
        case Next(source=source):
            yield source
        case InPlace(target=target, operand=operand):
            yield from (target, operand)
        case Delete(target=target) if len(target) > 1:
            yield target
        case Enter(context=context) | Exit(context=context):
            yield context
        case Make(items=items):
            yield from (path for _, path in items)
        case Fresh(uses=used):
            yield from used
        case Lookup(target=target):
            yield target
        case Capture(names=names):
            yield from ((name,) for name in names)
        case Yield(source=source) if source is not None:
            yield source
