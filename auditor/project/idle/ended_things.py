"""Stores of things that a class ends where it does not put them back:

    if reusable and len(self._idle) < self.keep:
        self._idle.append(conn)
    else:
        conn.close()

One that such a class takes out, asks something and neither ends nor lends nor puts back was forgotten, unless
what it asked is whether that has ended by itself."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.modules import Class, Function
from auditor.project.idle.reasons import BOOKS
from auditor.project.idle.setting import CLOSING
from auditor.project.idle.stock import Stock
from auditor.project.idle.supply import comes_back_by_itself, taken_ids
from auditor.project.shapes.field_work import FieldWork
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

ENDS = re.compile(rf"(?:{CLOSING.pattern}|dispose|free|unlink|hang_?up|stop)")
ENDING = re.compile(rf"\.{ENDS.pattern}\(\)")

ENDED = frozenset({"closed", "closing", "alive", "dead", "gone", "connected", "disconnected", "terminated",
                   "finished", "done", "exited", "returncode", "poll", "running", "eof", "exists", "fileno",
                   "valid", "broken"})  # fmt: skip
"""Words that tell that there is nothing left to be ended, or nothing that could be."""

KNOWN_ELSEWHERE = BOOKS - {"stale", "pinned", "version", "generation", "epoch", "stamp"}
"""Words by which the class's books say that somebody else has it."""

BOUNDS = frozenset({"max", "maximum", "limit", "most"})
WEAR = frozenset({"count", "counts", "uses", "use", "used"})
"""Words by which, beside those, the class tells that one is worn out: `conn.uses >= self.max_uses`."""


def ended_stock(cls: Class, later: Sequence[FieldWork]) -> Stock | None:
    """The stores from which one method lends, and whose things one of the class's methods ends."""
    names = sorted({name for work in later for name, _ in work.taken})
    fields = frozenset(name for name in names if _is_lent(later, name) and _is_ended(later, name))
    if not fields or comes_back_by_itself(cls, frozenset()):
        return None
    return Stock(cls, fields, tuple(later), given=True, full=fields, ends=True)


def tells_no_end(test: ast.expr) -> bool:
    """Whether the condition neither says that there is nothing, nor that the thing has ended, nor that
    somebody else has it."""
    if any(isinstance(node, ast.Constant) and node.value is None for node in walk(test)):
        return False
    nodes = (node for node in walk(test) if isinstance(node, ast.Name | ast.Attribute))
    words = {word.lower() for node in nodes for word in split(getattr(node, "attr", getattr(node, "id", "")))}
    wear = WEAR if not BOUNDS.isdisjoint(words) else frozenset()
    return words.isdisjoint((ENDED | KNOWN_ELSEWHERE) - wear)


def _is_lent(later: Sequence[FieldWork], name: str) -> bool:
    takers = [work for work in later if work.hands_out(taken_ids(work, {name}))]
    return bool(takers) and any(
        put.field == name and work.is_from_told(put.thing) for work in later for put in work.put
    )


def _is_ended(later: Sequence[FieldWork], name: str) -> bool:
    """By a method that takes it out, or by one that is told one and puts others in."""
    return any(_ends(work.method, *_things(work, name)) for work in later)


def _things(work: FieldWork, name: str) -> tuple[Set[str], Set[int]]:
    taken = taken_ids(work, {name})
    put = [node for put in work.put if put.field == name for node in walk(put.thing)]
    told = {node.id for node in put if isinstance(node, ast.Name) and node.id in work.from_told}
    return work.derived(frozenset(told), taken) if taken or told else frozenset(), taken


def _ends(method: Function, names: Set[str], taken: Set[int]) -> bool:
    """`conn.close()`, `conn.raw.close()`, `self._idle.pop().close()`"""
    return any(
        id(thing) in taken or (isinstance(thing, ast.Name) and thing.id in names)
        for call in method.calls
        if isinstance(call.func, ast.Attribute) and ENDS.fullmatch(call.func.attr) and not call.args
        for thing in _along(call.func.value)
    )


def _along(node: ast.expr) -> Iterator[ast.expr]:
    yield node
    while isinstance(node, ast.Attribute):
        node = node.value
        yield node
