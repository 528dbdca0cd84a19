"""Records that are told of a lease when they are made, and whose own end gives it back on some ways only:

    slots[rid] = Slot(row, matcher)

    def close(self):
        self.rows.put(self.row)
        if not self.done:
            self.matchers.restore(self.matcher)

What decides there must say nothing of the lease: a flag that an end sets, that the record was told, or that
another method sets which gives it back, tells that it is no more the record's to end."""

import ast
from collections.abc import Iterable, Iterator, Set

from auditor.flow.lease import Field, StoredField
from auditor.project.code.bindings import assignments, own_attribute, told_by_position
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.project.fields.elsewhere import released_attributes
from auditor.project.fields.exits import own_attributes, what_decides
from auditor.project.fields.forgetting import CLOSING, INITIAL
from auditor.project.fields.in_records import Part, Records
from auditor.project.outcome import Outcome


def closed_in_part(records: Records, outcomes: Iterable[Outcome]) -> Iterator[tuple[Outcome, StoredField]]:
    for outcome in outcomes:
        for part in records.parts(outcome, handed_out=True):
            if part.made is None or not part.alone or outcome.acquisition.foreign:
                continue
            field = Field(part.record.qualname, part.field, part.record.name)
            if (ender := _ends_in_part(records, part)) is not None:
                yield outcome, StoredField(field, outcome.lease.span, partly_by=(ender.qualname,))


def _ends_in_part(records: Records, part: Part) -> Function | None:
    """The one end of such records, where nobody else gives back what is in the field, but those who leave
    nothing there."""
    family = [each for each in part.record.methods.values() if each.name not in INITIAL]
    enders = [each for each in family if _gives_back(records, part, each)]
    ends = [each for each in enders if CLOSING.fullmatch(each.name)]
    if len(ends) != 1 or not all(each in ends or _empties(each, part.field) for each in enders):
        return None
    (ender,) = ends
    if any(other not in enders for other in records.ending(part)):
        return None
    own = ender.owner or ""
    tests = list(what_decides(ender, own, part.field))
    asked = {name for test in tests for name in own_attributes(test, ender, own)}
    if not asked or part.field in asked or not all(any(own_attributes(t, ender, own)) for t in tests):
        return None
    telling = _telling(part.record, enders, part.field) | set(_told(records, part))
    return ender if asked.isdisjoint(telling) else None


def _told(records: Records, part: Part) -> Iterator[str]:
    """The fields that the record is told where it is made, if it keeps them as told."""
    for position, _ in told_by_position(part.made) if part.made is not None else ():
        yield field_told(records.model, part.record, position).lstrip(".")


def _empties(method: Function, field: str) -> bool:
    given = (
        value for target, value in assignments(method) if own_attribute(target, method.owner or "") == field
    )
    return any(isinstance(value, ast.Constant) and value.value is None for value in given)


def _gives_back(records: Records, part: Part, method: Function) -> bool:
    names = records.recogniser.ending_names(part.outcome.acquisition.protocol)
    known = {call for call in method.calls if getattr(call.func, "attr", "") in names}
    return part.field in released_attributes(method, of_others=False, known=known)


def _telling(record: Class, enders: Iterable[Function], field: str) -> Set[str]:
    """Fields that an end sets, that the record is told, or that are set beside the one of the lease."""
    found: set[str] = set()
    for method in record.methods.values():
        given = [
            (name, value)
            for target, value in assignments(method)
            if (name := own_attribute(target, method.owner or "")) is not None
        ]
        if method in enders or (method.name not in INITIAL and any(name == field for name, _ in given)):
            found |= {name for name, _ in given}
        elif method.name in INITIAL:
            told = set(method.parameters)
            found |= {name for name, value in given if isinstance(value, ast.Name) and value.id in told}
    return found
