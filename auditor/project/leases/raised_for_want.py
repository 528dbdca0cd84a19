"""Acquires that raise, in so many words, where there is nothing to lend: `raise PoolEmpty` in the pool, or in
what it asks. Whoever holds something already and asks for more is told of it that way."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.modules import Function, last_part
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.written_raises import begins_later, is_own

MISUSE = re.compile(
    r"Clos|Shut|Stop|Invalid|Illegal|Unknown|Missing|NotFound|Bad[A-Z]|Corrupt|Broken|Malformed|Mismatch|Cancel"
)
"""What is wrong with the question, with the thing, or with a pool that is no more, is no want."""


def raises_for_want(recogniser: Recogniser, function: Function, call: ast.Call, protocol: str) -> bool:
    """Whether this call of an acquire may raise so, and no handler around it is for any of what it raises."""
    lending = list(_lending(recogniser, function, call, protocol))
    if len(lending) != 1 or begins_later(function, lending[0], call):
        return False
    raised = recogniser.written_raises.by(lending[0])
    foreseen = raised != recogniser.written_raises.uncaught(function, call, raised)
    return not foreseen and any(is_own(each) and not MISUSE.search(each[0]) for each in raised)


def _lending(recogniser: Recogniser, function: Function, call: ast.Call, protocol: str) -> Iterator[Function]:
    """What the call reaches; where only its name and its protocol are known, the half so called."""
    targets, constructed, _ = recogniser.calls.targets(function, call)
    if targets or constructed is not None:
        known = () if constructed is not None else targets
        yield from (each for each in known if each in recogniser.acquiring or each in recogniser.wrappers)
        return
    for half, (pair, _) in recogniser.acquiring.items():
        if pair.name == protocol and half.name == last_part(call.func):
            yield half
