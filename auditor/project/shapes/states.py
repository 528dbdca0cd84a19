"""Places and objects of which each is in one of several states: one method looks for one that is at rest and
says what it is from now on, others, told which, say what comes next.

    def reserve(self):                        # ... if cell.state is State.EMPTY:
        cell.state = State.RESERVED           #         return cell
    def abandon(self, cell): cell.state = State.EMPTY
    def commit(self, cell): cell.state = State.COMMITTED

Whoever sets it to rest gives it back. Who says something else has used it up where another method looks for
those of which that is said, as a `drain()` does, or where his name says so; a page that is filled is still
owed.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from auditor.project.code.bindings import own_attribute, ways
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.full_at_first import things_to_do
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.ways import given_by
from auditor.protocols.vocabulary import SETTLING, split
from auditor.source.nodes import walk

USING_UP = SETTLING | {"submit"}


@dataclass(frozen=True, slots=True)
class Step:
    """From now on the `field` of the `place` says `state`."""

    field: str
    place: ast.expr
    state: str


def states(
    lending: Sequence[FieldWork], given: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, list[FieldWork]]]:
    """Who takes a place, and who gives it back or uses it up."""
    steps = {id(work): list(_steps(work)) for work in given}
    if sum(map(bool, steps.values())) < 2:
        return
    known = {id(work): compared(work.method) for work in given}
    for taker in lending:
        if things_to_do(taker.method.cls) or taker.method.name.startswith("_"):
            continue
        for taken in _taken(taker, steps.get(id(taker), [])):
            back = [
                work
                for work in given
                if work is not taker and _comes_after(taken, taker, work, given, steps, known)
            ]
            if back:
                yield taker, back


def _taken(work: FieldWork, steps: Sequence[Step]) -> Iterator[Step]:
    """Of places that nobody told it, which it hands out, or what lies there."""
    for step in steps:
        names = {each.id for each in walk(step.place) if isinstance(each, ast.Name)} - {work.method.owner}
        if names and names.isdisjoint(work.from_told):
            together = (made.bound for made in work.bindings if not made.bound.isdisjoint(names))
            kin = names.union(*together)  # `i` of `for i, cell in enumerate(self.cells)`
            if any(mentions(value, kin, frozenset()) for value in work.returned):
                yield step


def _comes_after(
    taken: Step,
    taker: FieldWork,
    work: FieldWork,
    given: Sequence[FieldWork],
    steps: Mapping[int, list[Step]],
    known: Mapping[int, Set[str]],
) -> bool:
    told = [
        step.state
        for step in steps[id(work)]
        if step.field == taken.field and step.state != taken.state and work.is_from_told(step.place)
    ]
    resting = known[id(taker)] - {taken.state}
    return any(
        state in resting
        or not USING_UP.isdisjoint(split(work.method.name)[:1])
        or any(
            each is not work and state in known[id(each)] and _sets_others(each, taken.field, steps[id(each)])
            for each in given
        )
        for state in told
    ) and _comes_to_rest(taken, taker, given, steps, resting)


def _sets_others(work: FieldWork, field: str, steps: Sequence[Step]) -> bool:
    """Of places that it finds, or has another method do that."""
    found = any(step.field == field and not work.is_from_told(step.place) for step in steps)
    return found or not own_parameters(work.method)


def _comes_to_rest(
    taken: Step,
    taker: FieldWork,
    given: Sequence[FieldWork],
    steps: Mapping[int, list[Step]],
    resting: Set[str],
) -> bool:
    """Somebody sets back what the taker looks for; where it looks at nothing, somebody sets it to another
    state than those of which it is told."""
    others = [(work, step) for work in given for step in steps[id(work)] if step.field == taken.field]
    return any(
        step.state in resting if resting else not work.is_from_told(step.place)
        for work, step in others
        if work is not taker and step.state != taken.state
    )


# What is said -----------------------------------------------------------------------------------------------


def _steps(work: FieldWork) -> Iterator[Step]:
    method = work.method
    for node in method.statements:
        match node:
            case ast.Assign(targets=[target], value=value) if said := _state(value):
                yield from _of(target, said, method)
    helpers = method.cls.methods if method.cls is not None else {}
    for call in method.calls:
        helper = helpers.get(own_attribute(call.func, method.owner or "") or "")
        if helper is not None and helper is not method:
            yield from _through(call, helper)


def _through(call: ast.Call, helper: Function) -> Iterator[Step]:
    """`self._move(page, PageState.FILLED)`, which sets what it is told."""
    given = given_by(call, helper)
    for node in helper.statements:
        match node:
            case ast.Assign(targets=[target], value=value):
                said = given.get(value.id, value) if isinstance(value, ast.Name) else value
                state = _state(said)
                for step in _of(target, state, helper) if state else ():
                    if isinstance(step.place, ast.Name) and step.place.id in given:
                        yield Step(step.field, given[step.place.id], state)


def _of(target: ast.expr, state: str, method: Function) -> Iterator[Step]:
    """`cell.state = ...`, `self.cells[at].state = ...`, `self.states[at] = ...`."""
    match target:
        case ast.Attribute(value=ast.Name(id=name) as place, attr=field) if name != method.owner:
            yield Step(field, place, state)
        case ast.Attribute(value=ast.Subscript(slice=place), attr=field):
            yield Step(field, place, state)
        case ast.Subscript(value=table, slice=place) if own := own_attribute(table, method.owner or ""):
            yield Step(own, place, state)


def states_of(value: ast.expr) -> Set[str]:
    """`PENDING if again else FAILED` says either."""
    return {state for way in ways(value) if (state := _state(way))}


def _state(value: ast.expr) -> str:
    """`State.BUSY`, `BUSY`, `"busy"`, alone or with whose it is."""
    match value:
        case ast.Attribute(attr=name) | ast.Name(id=name) if name.isupper():
            return ast.unparse(value)
        case ast.Constant(value=str() as name) if name.isidentifier():
            return ast.unparse(value)
        case ast.Tuple(elts=[first, *_]):
            return _state(first)
    return ""


def compared(method: Function) -> Set[str]:
    """States for which it looks."""
    found = set()
    for node in method.nodes:
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
            case ast.Call(func=ast.Attribute(attr="index"), args=[each]):
                sides = [each]
            case _:
                continue
        parts = (part for side in sides for part in getattr(side, "elts", [side]))
        found |= {state for part in parts if (state := _state(part))}
    return found
