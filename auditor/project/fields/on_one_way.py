"""Ends of records that see to all of their leases on one way and forget one on another: `on_sent(key, ok)`
takes the request out of `self.sending`, gives back its slot where all went well, and its pages alone where it
did not."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.lease import StoredField
from auditor.ir.ops import Assume
from auditor.project.code.bindings import assignments, awaited, told_by_position
from auditor.project.code.modules import Class, Function
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.record_ends import RecordEnds, left_on
from auditor.project.fields.record_places import RecordPlace
from auditor.project.fields.ways_out import WayOut
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

Siblings = Sequence[tuple[Outcome, RecordPlace]]


class OnOneWay(RecordEnds):
    """Asks each method that gives such leases back of its other ways out."""

    def _forgotten_on_a_way(self, outcome: Outcome) -> Iterator[StoredField]:
        place, cls = self._record_place(outcome), outcome.function.cls
        if place is None or cls is None or outcome.acquisition.foreign or not place.sure or place.perhaps:
            return
        siblings = self._siblings(outcome, place)
        for method in self.family_of(cls) if siblings else ():
            if method is outcome.function or method.owner is None or method.name in INITIAL:
                continue
            ways = self._forgetful_ways(outcome, place, method, siblings)
            if any(True for _ in ways) and not self._callers_see_to_it(method, place, ()):
                yield StoredField(
                    place.as_field(cls.qualname), outcome.lease.span, partly_by=(method.qualname,)
                )
                return

    def _forgetful_ways(
        self, outcome: Outcome, place: RecordPlace, method: Function, siblings: Siblings
    ) -> Iterator[WayOut]:
        """On which it has taken the record out, and given back what lies beside the lease."""
        start = place.in_tables(method)
        if not any(f".{table}" in method.text for table in place.tables):
            return
        followed = self.followed_all(method, start, outcome.acquisition)
        if followed is None or not followed.endings.released or followed.endings.unknown:
            return
        alike = self._are_all_alike(outcome)
        for way in left_on(method, followed, start[0][:2]):
            if way.is_told_apart() or (not alike and _is_told_apart(way)):
                continue
            beside = any(self._ends_beside(way, its, other) for other, its in siblings)
            if beside and _is_at_hand(way) and not self._is_given_away(method, way):
                yield way

    def _are_all_alike(self, outcome: Outcome) -> bool:
        """Such records are made in one place, which puts a lease into each: `Ticket(lane, event)`."""
        function, lease = outcome.function, outcome.lease
        records = [
            record
            for made in function.calls
            if any(
                value is outcome.call or (lease.holder and getattr(value, "id", "") == lease.holder)
                for _, value in told_by_position(made)
            )
            if isinstance(record := self.model.callee(function, made.func), Class)
        ]
        return (
            len(records) == 1
            and sum(len(module.makers(records[0].name)) for module in self.project.parsed()) == 1
        )

    def _ends_beside(self, way: WayOut, place: RecordPlace, other: Outcome) -> bool:
        """Since the record is out, what lies in another field of it goes back on this way."""
        start = place.in_tables(way.method)
        followed = self.followed_all(way.method, start, other.acquisition) if start else None
        released = followed.endings.released if followed is not None else {}
        return any(station.node in released for station in way.since)


def _is_at_hand(way: WayOut) -> bool:
    """`job = self.jobs.pop(key)`: it is this one, and none of those that stay in the table."""
    names = {place[0] for place in way.held.places}
    return any(
        getattr(target, "id", "") in names
        for target, value in assignments(way.method)
        if awaited(value) is way.taken
    )


def _is_told_apart(way: WayOut) -> bool:
    """`if request.started:` says which records have the lease at all; that there is a record says nothing,
    `if job.lease.expires < now:` asks the lease itself, and `job.tries` has been counted up here."""
    names = {place[0] for place in way.held.places}
    counted = {
        f".{node.target.attr}"
        for node in way.method.statements
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
    }
    asked = (op for station in way.since if isinstance(op := way.ops[station.node], Assume))
    return any(
        op.names & names and not _fields_asked(op, names) <= counted and not _asks_the_lease(way, op)
        for op in asked
    )


def _fields_asked(op: Assume, names: Set[str]) -> set[str]:
    """Of the record, `job.tries < self.most`, or else of what it is compared with, `job in self.urgent`."""
    its = {
        f".{node.attr}"
        for node in walk(op.at)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in names
    }
    return its or {name for name in op.names if name.startswith(".")}


def _asks_the_lease(way: WayOut, op: Assume) -> bool:
    fields = {place[1][1:] for place in way.held.places if len(place) == 2}
    return _measures_the_lease(op.at, fields) or any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in fields
        and isinstance(node.value.value, ast.Name)
        for node in walk(op.at)
    )


def _measures_the_lease(test: ast.AST, fields: Set[str]) -> bool:
    """`if self.newest - job.version > limit:`, and not `if job.slot < 0:`, which may stand for none."""
    return (
        isinstance(test, ast.Compare)
        and all(isinstance(each, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for each in test.ops)
        and not any(isinstance(side, ast.Constant | ast.UnaryOp) for side in (test.left, *test.comparators))
        and any(isinstance(node, ast.Attribute) and node.attr in fields for node in walk(test))
    )
