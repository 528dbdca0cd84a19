"""What is asked of an object that says which one it is, and whom it was asked of: `buffer.data_ptr()`,
`id(buffer)`. A pool that goes by it is given the object back so."""

import re
from collections.abc import Iterable

from auditor.ir.ops import Call, Move, Op, Path

SAYING_WHICH = re.compile(
    r"_*(?:get_)?(?:data_ptr|ptr|pointer|addr|address|id|key|handle|index|offset|slot|number)"
)


def identities(ops: Iterable[Op]) -> dict[Path, Path]:
    """From the answer, under whatever name, to the object."""
    found: dict[Path, Path] = {}
    for op in ops:
        match op:
            case Call(receiver=None, method="id", args=((asked, False),)):
                found[op.target] = asked
            case Call(receiver=tuple(asked), args=(), kwargs=()) if SAYING_WHICH.fullmatch(op.method):
                found[op.target] = asked
            case Move(source=source) if len(op.target) == 1 and source in found:
                found[op.target] = found[source]
    return found
