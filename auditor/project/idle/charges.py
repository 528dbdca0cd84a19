"""Which statements of a class take from one of its counters what another method gives back, whichever way the
counter runs: `self.left -= size` of what is full at first, `self.used[device] += size` up to a limit."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.project.code.bindings import assignments, own_attribute, suites_of
from auditor.project.code.modules import Class, Function
from auditor.project.shapes.field_work import FieldWork
from auditor.protocols.vocabulary import RELEASE_WORDS, split
from auditor.source.nodes import walk

ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

OF_EVENTS = frozenset({"fail", "failed", "failure", "failures", "error", "errors", "miss", "misses", "retry",
                       "retries", "attempt", "attempts", "strike", "strikes", "timeouts", "rejected",
                       "hits"})  # fmt: skip
"""Words of counters of what happened: nobody has any of it."""


@dataclass(frozen=True)
class Counter:
    """A field that takes run down (-1) or up (1), of which each key may have one of its own."""

    name: str
    way: int


def charges(
    cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, ast.AugAssign, Counter]]:
    """What is taken in methods of the class itself."""
    changed = {(name, way, work.method.name) for work in later for name, way in _changed(work)}
    ways = {(name, way) for name, way, _ in changed}
    counters = {Counter(name, way) for name, way in ways if (name, -way) in ways}
    counters = {each for each in counters if _begins(each, begun) and not _is_reset(each.name, later)}
    for work in later if counters else ():
        if work.method.cls is not cls or not RELEASE_WORDS.isdisjoint(split(work.method.name)):
            continue
        for node, counter in _within(work, counters):
            back = {method for name, way, method in changed if (name, way) == (counter.name, -counter.way)}
            if back - {work.method.name} and (is_measured(work, counter) or tallies(work.method, node)):
                yield work, node, counter


def _changed(work: FieldWork) -> Iterator[tuple[str, int]]:
    yield from work.counted
    yield from ((name, way) for name, way, _, _ in work.balances)


def changed_by(node: ast.AST, own: str) -> Counter | None:
    """`self.left -= n`, `self.left[key] -= n`"""
    match node:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op):
            table = target.value if isinstance(target, ast.Subscript) else target
            name = own_attribute(table, own)
            return Counter(name, 1 if isinstance(op, ast.Add) else -1) if name is not None else None
    return None


def _within(work: FieldWork, counters: set[Counter]) -> Iterator[tuple[ast.AugAssign, Counter]]:
    for node in work.method.statements:
        counter = changed_by(node, work.method.owner or "")
        if isinstance(node, ast.AugAssign) and counter in counters and counter is not None:
            yield node, counter


def _begins(counter: Counter, begun: Sequence[FieldWork]) -> bool:
    """What runs down is told how many there are, or there are several; what runs up begins at 0."""
    if counter.way > 0 and not OF_EVENTS.isdisjoint(split(counter.name)):
        return False
    for work in begun:
        for at, value in assignments(work.method):
            if own_attribute(at, work.method.owner or "") == counter.name:
                return _is_zero(value) if counter.way > 0 else _is_several(value) or work.is_from_told(value)
    return False


def _is_several(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value > 1


def _is_zero(value: ast.expr) -> bool:
    """`0`, `[0] * n`, `{name: 0 for name in names}`, `defaultdict(int)`."""
    match value:
        case ast.Constant(value=0) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=ast.Name(id="defaultdict" | "Counter")):
            return True
        case ast.BinOp(left=ast.List(elts=[inner])) | ast.ListComp(elt=inner) | ast.DictComp(value=inner):
            return _is_zero(inner)
        case ast.Call(func=ast.Attribute(attr="fromkeys"), args=[_, inner]):
            return _is_zero(inner)
    return False


def _is_reset(name: str, later: Sequence[FieldWork]) -> bool:
    """`self.patience = self.start`: nobody has to give back what runs anew by itself."""
    return any(
        own_attribute(at, work.method.owner or "") == name
        for work in later
        for at, _ in assignments(work.method)
    )


def is_measured(work: FieldWork, counter: Counter) -> bool:
    """The method asks whether there is enough, `if self.available < 0:`, or whether the limit is reached,
    `if self.used + n > self.limit:`; who counts users asks whether it was the last."""
    own = work.method.owner or ""
    for node in work.method.nodes:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, ORDERED):
                for side, other in ((left, right), (right, left)):
                    bounded = counter.way < 0 or not isinstance(other, ast.Constant) or _is_several(other)
                    if bounded and any(_is_it(each, counter, own) for each in _summands(side)):
                        return True
    return False


def _is_it(node: ast.expr, counter: Counter, own: str) -> bool:
    return own_attribute(node.value if isinstance(node, ast.Subscript) else node, own) == counter.name


def _summands(side: ast.expr) -> Iterator[ast.expr]:
    if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Add | ast.Sub):
        yield from (*_summands(side.left), *_summands(side.right))
    else:
        yield side


def tallies(function: Function, charge: ast.AugAssign) -> set[str]:
    """`taken += 1`, beside."""
    beside = next((suite for suite in suites_of(function.node) if charge in suite), [])
    counts = (node for node in beside if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add))
    return {node.target.id for node in counts if isinstance(node.target, ast.Name)}


def is_cut(answer: ast.expr | None, amount: ast.expr) -> bool:
    """`return got - got % step`, `return got // step * step`, where `got` was taken: the rest is nobody's."""
    match answer:
        case ast.BinOp(left=one, op=ast.Sub(), right=ast.BinOp(left=other, op=ast.Mod())):
            return ast.dump(one) == ast.dump(other) == ast.dump(amount)
        case (
            ast.BinOp(left=ast.BinOp(left=one, op=ast.FloorDiv(), right=step), op=ast.Mult(), right=again)
            | ast.BinOp(left=again, op=ast.Mult(), right=ast.BinOp(left=one, op=ast.FloorDiv(), right=step))
        ):
            return ast.dump(one) == ast.dump(amount) and ast.dump(step) == ast.dump(again)
    return False


def guarded_after(function: Function, charge: ast.AugAssign) -> set[int]:
    """What stands in a `try` with handlers that begins after the charge."""
    tries = (node for node in walk(function.node) if isinstance(node, ast.Try) and node.handlers)
    later = (node for node in tries if node.lineno > charge.lineno)
    return {id(part) for node in later for each in node.body for part in walk(each)}
