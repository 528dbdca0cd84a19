"""Further ends of a pair: methods that are told the same, and do what a known end does to the pool.

    def claim(self): ...                                             # notes what it hands out
    def ack(self, message): self.inflight.pop(message.id)
    def bury(self, message): self.inflight.pop(message.id); self.dead.append(message)

Of a lease that is told to `bury`, the pool keeps no more than of one that was acknowledged, whatever else
becomes of it. Nor does who scraps a channel owe it, where the pool gets another one for that.
"""

import ast
from collections.abc import Iterable, Set
from dataclasses import replace

from auditor.flow.effects import Handle, Position
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.pools.bodies import SIMPLE
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lasting import Lasting, undoing
from auditor.project.shapes.changes import Change, Did
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.marked_places import marks_back
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.ways import SELF, Way

TOLD = frozenset({Handle.RESULT, Handle.ARGUMENT})
MARKING = frozenset({Did.IN, Did.CLEAR})
Undone = frozenset[tuple[Way, Did, str]]
Begun = list[tuple[Function, list[Change]]]


def also_ended(pair: Pair, methods: Iterable[Function], lasting: Lasting) -> Pair:
    """The pair, with those methods among its ends."""
    ends = [half for half in pair.releases if half.handle in TOLD and own_parameters(half.function)]
    known = {half.function for half in (*pair.acquires, *pair.releases)}
    takers = {half.function.name for half in pair.acquires}
    public = {half.function.name for half in ends if not half.function.name.startswith("_")}
    others = [
        each for each in methods if each not in known and _may_end(each) and not _asks(each, public | takers)
    ]
    if not ends or not others:
        return pair
    begun = [(half.function, lasting.of(half.function)) for half in pair.acquires]
    found: dict[Function, Half] = {}
    for half in ends:
        undone = _undone(begun, half.function, lasting.of(half.function))
        for method in others if undone else ():
            at = _told_at(method, half)
            at = 0 if at is None and _is_where_it_is_told(method, undone) else at
            if method in found or at is None:
                continue
            done = lasting.of(method)
            if undone <= _undone(begun, method, done) and not _takes_again(begun, undone, done):
                found[method] = replace(half, function=method, argument=at)
    return replace(pair, releases=(*pair.releases, *found.values())) if found else pair


def _may_end(method: Function) -> bool:
    return (
        not method.name.startswith("_")
        and not method.is_abstract
        and LENDING.isdisjoint(method.decorators)
        and bool(own_parameters(method))
    )


def _asks(method: Function, names: Set[str]) -> bool:
    """`publish(page)` recycles it on one of its ways: what it does is followed."""
    return any(own_attribute(call.func, method.owner or "") in names for call in method.calls)


def _takes_again(begun: Begun, undone: Undone, done: Iterable[Change]) -> bool:
    """`exists(key)` holds it for a while: it does there what the takers do as well."""
    ways = {way for way, _, said in undone if not said}
    taken = {(_place(change), change.did) for _, changed in begun for change in changed}
    return any(_place(each) in ways and (_place(each), each.did) in taken for each in done)


def _place(change: Change) -> Way:
    return change.way if change.way[0] == SELF else ("", change.way[-1])


def _undone(begun: Begun, end: Function, ended: list[Change]) -> Undone:
    """Of what the takers do to the pool and to what it has; or else what it does there: `self.over[at] = 1`
    says that it is over."""
    found = [each for taker, changed in begun for each in undoing(taker, changed, end, ended)]
    said = not found
    if said:
        touched = {change.way for _, changed in begun for change in changed if change.way[0] == SELF}
        found = [
            each for each in ended if each.way in touched and each.did in MARKING and _constant(each.value)
        ]
    return frozenset((_place(each), each.did, _constant(each.value) if said else "") for each in found)


def _constant(value: ast.expr | None) -> str:
    return repr(value.value) if isinstance(value, ast.Constant) else ""


def _told_at(method: Function, known: Half) -> Position | None:
    """Where it is told what the known end is told: by the same name, or something of the same class."""
    name, said = _told_by(known)
    for at, (other, kind) in enumerate(_parameters(method)):
        if other == name or (kind == said and said not in SIMPLE):
            return at if at == 0 else other
    return None


def _is_where_it_is_told(method: Function, undone: Undone) -> bool:
    """Whether all this is struck off or unmarked at places that the method is told."""
    work = field_work(method)
    struck = {field for field, key in work.removed if work.is_from_told(key)}
    return all(
        len(way) == len((SELF, "field"))
        and (
            (did is Did.OUT and way[1] in struck) or (did is Did.CLEAR and marks_back(work, way[1], on=True))
        )
        for way, did, _ in undone
    )


def _told_by(half: Half) -> tuple[str, str]:
    told = _parameters(half.function)
    at = half.argument
    return next((each for index, each in enumerate(told) if at in (index, each[0])), told[0])


def _parameters(method: Function) -> list[tuple[str, str]]:
    """Its own ones with what is said of their classes."""
    args = getattr(method.node, "args", None)
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs] if isinstance(args, ast.arguments) else []
    said = {each.arg: ast.unparse(each.annotation) if each.annotation else "" for each in named}
    return [(name, said.get(name, "")) for name in own_parameters(method)]
