"""Lists of leases of which a part is given back: `pool.free(blocks[:n])`, and the rest is named no more."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Position
from auditor.flow.passing import operands
from auditor.ir.ops import (
    Await,
    Call,
    Capture,
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


def parts_given(call: Call, lists: frozenset[Path], acquire: ast.AST) -> Iterator[Position]:
    """The operands that are slices of one of these lists and leave something; `blocks[:n]` of `allocate(n)`
    is all of it."""
    for position, operand in operands(call):
        if operand[-1] == "[:]" and operand[:-1] in lists and _is_a_part(call, position, acquire):
            yield position


def _is_a_part(call: Call, position: Position, acquire: ast.AST) -> bool:
    given = (
        call.at.args[position] if isinstance(position, int) and 0 <= position < len(call.at.args) else None
    )
    match given:
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None)):
            bounds = [bound for bound in (lower, upper) if bound is not None]
            return bool(bounds) and not any(_is_an_end(bound, acquire) for bound in bounds)
    return False


def _is_an_end(bound: ast.expr, acquire: ast.AST) -> bool:
    """`blocks[0:]`, `blocks[:len(blocks)]`, or what the acquire was told."""
    if isinstance(bound, ast.Constant) and bound.value in (0, None):
        return True
    if any(isinstance(inner, ast.Call) for inner in ast.walk(bound)):
        return True
    written = ast.dump(bound)
    return any(ast.dump(inner) == written for inner in ast.walk(acquire))


def uses(op: Op) -> Iterator[Path]:
    """What an operation reads."""
    match op:
        case Call():
            yield from (path for _, path in operands(op))
        case Move(source=source) | Await(source=source) | Unpack(source=source) | Store(source=source):
            yield source
        case Next(source=source):
            yield source
        case InPlace(operand=operand):
            yield operand
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
