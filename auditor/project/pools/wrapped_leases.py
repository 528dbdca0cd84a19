"""Objects that a pool wraps its leases in, with a method that tells the pool's own release what is in them:
`draw()` returns `Envelope(self, index)`, and `envelope.discard()` calls `self.box.hand_in(self.index)`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial

from auditor.flow.effects import Handle, Value
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lasting import Lasting, undoing
from auditor.project.pools.lent_objects import goes_straight_on, lent_class, needs_nothing, stored_class
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.name_bindings import mentions
from auditor.protocols.vocabulary import Name

MADE_AROUND = re.compile(r"\b_?[A-Z]\w*\(self\b")
"""An object that the pool makes around itself."""

WRAPPED = frozenset({Handle.RESULT, Handle.RECEIVER})
"""What is in the object: a number that was handed out, or one of those that the pool counts; what the pool
was told is in it where nobody else tells the pool so."""


def with_ends_of_wrappers(model: ClassModel, pair: Pair) -> Pair:
    """The pair, with those methods among its ends: what is lent is the object, then, not the number in it."""
    if pair.owner is None:
        return pair
    acquires: list[Half] = []
    ends: dict[Function, Half] = {}
    for half in pair.acquires:
        told = half.handle is Handle.ARGUMENT and MADE_AROUND.search(half.function.text) is not None
        lent = _lent(model, pair.owner, half) if told or half.handle in WRAPPED else None
        wanted = frozenset({Handle.ARGUMENT}) if told else WRAPPED
        names = {each.function.name for each in pair.releases if each.handle in wanted}
        if told and lent is not None:
            names = {name for name in names if _asked_by_them_alone(model, name, (lent, pair.owner))}
        own = list(_telling(lent, names)) if lent is not None and lent is not pair.owner else []
        own += list(_telling(lent, _putting(pair.owner))) if lent is not None and own else []
        ends |= {end: Half(end, Name("release", frozenset()), Handle.RECEIVER) for end in own}
        wrapped = replace(half, handle=Handle.RESULT, value=Value.OBJECT)
        acquires.append(wrapped if own else half)
    known = {half.function for half in pair.releases}
    added = tuple(half for end, half in ends.items() if end not in known)
    return replace(pair, acquires=tuple(acquires), releases=(*pair.releases, *added))


def wrapped_pairs(model: ClassModel, pool: Class, known: Set[Function]) -> Iterator[Pair]:
    """`read(number)` counts one more reader of what it wraps in `ReadLease(self, version)`, and `lease.end()`
    tells the pool's own `_unread(self.version)`."""
    methods = [method for name, method in sorted(pool.methods.items()) if not name.endswith("=")]
    makers = [method for method in methods if MADE_AROUND.search(method.text)]
    lasting = Lasting(partial(model.lineage, pool))
    for begins in makers:
        if begins in known or begins.is_abstract or not LENDING.isdisjoint(begins.decorators):
            continue
        lent = lent_class(model, pool, begins)
        if lent is None or lent is pool or f"{lent.name}(self" not in begins.text:
            continue
        begun = lasting.of(begins)
        telling = {each: list(_telling(lent, {each.name})) for each in methods if each is not begins}
        back = [
            each
            for each, tellers in telling.items()
            if tellers and undoing(begins, begun, each, lasting.of(each))
        ]
        ends = sorted({end for each in back for end in telling[each]}, key=lambda end: end.name)
        if back:
            half = Half(begins, Name("acquire", frozenset()), Handle.RESULT, by_shape=True)
            releasing = Name("release", frozenset())
            halves = (
                *(Half(end, releasing, Handle.RECEIVER) for end in ends),
                *(Half(each, releasing, Handle.RESULT) for each in back),
            )
            yield Pair(f"{pool.name}.{begins.name}()", pool, (half,), halves, proposed=True)


def _asked_by_them_alone(model: ClassModel, name: str, classes: Sequence[Class]) -> bool:
    """`self.budget.put_back(self.units)` of a permit, and no `budget.put_back(units)` of whoever was told the
    number, and has not kept the permit."""
    call = f".{name}("
    asked = sum(model.project.sources[path].count(call) for path in model.project.calling(name))
    return asked == sum(each.text.count(call) for each in classes)


def _lent(model: ClassModel, pool: Class, half: Half) -> Class | None:
    found = lent_class(model, pool, half.function)
    return found if found is not None else stored_class(model, pool, half.function)


def _putting(pool: Class) -> set[str]:
    """`_sealed(segment)`, private, which puts what it is told into another store: somebody else goes on with
    it there."""
    return {
        name
        for name, method in pool.methods.items()
        if name.startswith("_") and not name.startswith("__")
        if any(getattr(put.value, "id", "") in method.parameters[1:] for put in field_work(method).put)
    }


def _telling(lent: Class, names: set[str]) -> Iterator[Function]:
    """Its methods that call one of the pool's `names` on a field of theirs, with another field or nothing.
    Those that are told something do so each time, and stand beside one that is not."""
    found = [
        method
        for _, method in sorted(lent.methods.items())
        if any(_tells(method, name) for name in names)
        if needs_nothing(method) or (goes_straight_on(method) and not method.name.startswith("_"))
    ]
    if any(map(needs_nothing, found)):
        yield from found


def _tells(method: Function, name: str) -> bool:
    """What it has, or what it makes up itself: `self._limiter.settle(+0.1, clock() - self._began)`."""
    own = method.owner or ""
    others = {*method.parameters} - {own}
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=pool, attr=asked) if asked == name and own_attribute(pool, own):
                return all(
                    own_attribute(told, own)
                    or getattr(told, "id", "") == own
                    or _is_of_its_own(method, told, others)
                    for told in call.args
                )
    return False


def _is_of_its_own(method: Function, told: ast.expr, others: Set[str]) -> bool:
    """`left` of `left, self.left = self.left, 0`, and whatever else speaks of nothing that it is told."""
    if not isinstance(told, ast.Name):
        return not mentions(told, others, frozenset())
    given = list(given_to(method, told.id)) if told.id not in others else []
    return bool(given) and not any(mentions(each, others, frozenset()) for each in given)
