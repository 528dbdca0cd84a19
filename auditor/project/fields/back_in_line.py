"""Records that go back to where they came from with a lease on them: `preempt(job)` gives back the pages
of the job, puts it in front of `self.waiting` and forgets its slot, and `admit(job)`, which is handed the
first of those that wait, puts another slot over it."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.lease import StoredField
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, given_to, gone_through, own_attribute, told_by_position
from auditor.project.code.modules import Function
from auditor.project.fields.on_one_way import OnOneWay
from auditor.project.fields.record_places import RecordPlace, put_into, takes_from
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


class BackInLine(OnOneWay):
    """Asks each method that puts such records back what becomes of their leases."""

    def _still_on_it(self, outcome: Outcome) -> Iterator[StoredField]:
        place, function = self._record_place(outcome), outcome.function
        cls = function.cls
        if place is None or cls is None or not place.told or outcome.acquisition.foreign:
            return
        family = list(self.family_of(cls))
        line = set(taken_from(function, place.told)) | {*_handed_from(family, function, place.told)}
        if (
            not line
            or _is_done_once(function, outcome.call)
            or any(_reads(each, place) for each in (function, *_callers(family, function)))
        ):
            return
        siblings = self._siblings(outcome, place)
        if siblings and any(self._sweeps(outcome, place, method, line) for method in family):
            return
        for method in family if siblings else ():
            if method is function or not self._puts_back(outcome, place, method, line):
                continue
            if any(self._gives_back_there(other, its, method) for other, its in siblings):
                field = place.as_field(cls.qualname)
                yield StoredField(field, outcome.lease.span, partly_by=(method.qualname,))
                return

    def _puts_back(self, outcome: Outcome, place: RecordPlace, method: Function, line: set[str]) -> bool:
        """The lease goes into one of these tables with its record, and nowhere else."""
        back = False
        for start in self._starts(place, method) if self._may_forget(method, place) else ():
            followed = self.followed_all(method, start, outcome.acquisition)
            if followed is None:
                return False
            ends = followed.endings
            if ends.is_somebodys:
                return False
            into = {table for path in ends.stored.values() for table in _goes_into(method, path)}
            if start[0][0] == method.owner:  # the others of the table stay where they are
                into -= {path[1][1:] for path in start}
            back = back or (bool(into) and into <= line)
        return back and not self._callers_see_to_it(method, place, ())

    def _sweeps(self, outcome: Outcome, place: RecordPlace, method: Function, line: set[str]) -> bool:
        """It gives back what those who wait still have, and leaves them where they are."""
        own = method.owner or ""
        starts = tuple((own, f".{table}", ANY_ITEM, *place.field) for table in sorted(line))
        if takes_from(method, line) or not any(f".{table}" in method.text for table in line):
            return False
        followed = self.followed_all(method, starts, outcome.acquisition)
        return followed is not None and bool(followed.endings.released)


def _goes_into(method: Function, path: Path) -> Iterator[str]:
    """Tables that a record so named goes into: `self.waiting.append(victim)`."""
    if path[0] == method.owner and len(path) > 2:
        yield path[1][1:]
    elif path[0].isidentifier():
        yield from put_into(method, path[0])


def taken_from(function: Function, name: str) -> Iterator[str]:
    """The tables of the own object out of which the name has its records."""
    for value in (*given_to(function, name), *gone_through(function, name)):
        yield from _table(value, function)


def _handed_from(family: Sequence[Function], function: Function, told: str) -> Iterator[str]:
    """The same of what callers tell: `self._admit(self.waiting[0])`."""
    if told not in function.parameters:
        return
    position = function.parameters.index(told) - 1
    for caller in family:
        for call in caller.calls:
            if own_attribute(call.func, caller.owner or "") != function.name:
                continue
            for at, value in told_by_position(call):
                if at in (position, told):
                    yield from _table(value, caller)
                    yield from taken_from(caller, value.id) if isinstance(value, ast.Name) else ()


def _table(value: ast.expr, function: Function) -> Iterator[str]:
    """`waiting` of `self.waiting[0]`, `self.waiting.popleft()`, `list(self.waiting)`."""
    fields = (
        own_attribute(node, function.owner or "") for node in walk(value) if isinstance(node, ast.Attribute)
    )
    yield from (field for field in fields if field is not None)


def _callers(family: Sequence[Function], function: Function) -> Iterator[Function]:
    return (each for each in family if any(last_name(call) == function.name for call in each.calls))


def _reads(function: Function, place: RecordPlace) -> bool:
    """It asks for the field before it fills it, or works with what is there."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == place.field[0][1:] and isinstance(node.ctx, ast.Load)
        for node in function.nodes
    )


def _is_done_once(function: Function, call: ast.Call) -> bool:
    """`if not batch.shelved:` around the call, which sets `batch.shelved`."""
    for node in function.statements:
        if isinstance(node, ast.If):
            asked = {ast.unparse(each) for each in walk(node.test) if isinstance(each, ast.Attribute)}
            inside = [part for each in node.body for part in walk(each)]
            filled = {ast.unparse(target) for target, _ in assignments(function) if target in inside}
            if asked & filled and call in inside:
                return True
    return False
