"""Futures: what the work returns that another thread does lies in them from the start."""

from auditor.flow.effects import BORROWED, TAKEN, Position, Treatment
from auditor.ir.ops import Call, Path

ASKING = frozenset({"done", "running", "cancelled", "exception"})
PASSING_ON = frozenset({"wait_for", "shield", "wrap_future", "ensure_future"})
"""Functions whose result is another future of the same work."""


def held_by_future(call: Call, position: Position, rest: Path) -> Treatment:
    """`future.result()` is the lease; whoever is told the future, or called when it is done, may end it."""
    if position == -1 and call.method == "result":
        return Treatment(result=rest[1:])
    if position == 0 and call.method in PASSING_ON:
        return Treatment(result=rest)
    return BORROWED if position == -1 and call.method in ASKING else TAKEN
