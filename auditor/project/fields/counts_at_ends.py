"""Counts that stand for a record: `open(name)` takes a seat and enters a stream, `finish(name)` takes it out
and gives the seat back, and `abort(name)` takes it out, gives back what lies in it, and no seat."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Handle
from auditor.flow.lease import Field, StoredField
from auditor.ir.calls import LOGGING, PUTTING
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.fields.one_end_forgets import OVER, callers
from auditor.project.fields.record_places import RecordPlace, put_into, taken_out_of, takes_from
from auditor.project.fields.refused_and_kept import RefusedAndKept
from auditor.project.fields.ways_out import SAYING
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split

ENDING_IT = OVER | {"expire", "fail", "reject", "reap", "disconnect"}
"""First words of methods after which the record is over."""


class CountsAtEnds(RefusedAndKept):
    """Asks each method that ends such records whether it counts."""

    def _left_counted(self, outcome: Outcome) -> Iterator[StoredField]:
        function, acquisition, lease = outcome.function, outcome.acquisition, outcome.lease
        nameless = acquisition.handle is Handle.RECEIVER and not acquisition.foreign
        if not nameless or function.cls is None or lease.leaks or not lease.handed_over:
            return
        tables = set(_entered(function))
        family = list(self.family_of(function.cls)) if tables else []
        names = self.recogniser.ending_names(acquisition.protocol)
        ending = [method for method in family if takes_from(method, tables)]
        counting = [method for method in ending if says_end(method, names, family)]
        sayers = [method for method in family if says_end(method, names, ())]
        for method in ending if counting else ():
            forgets = method not in counting and method is not function and split(method.name)[0] in ENDING_IT
            if (
                not forgets
                or self._goes_on(method, tables, sayers)
                or any(says_end(caller, names, ()) for caller in callers(self.project, method))
            ):
                continue
            if any(
                self._both_end(other, place, (method, *counting)) for other, place in self._beside(tables)
            ):
                field = Field(function.cls.qualname, f"{min(tables)}{ANY_ITEM}")
                yield StoredField(field, lease.span, partly_by=(method.qualname,))
                return

    def _left_in_its_table(self, outcome: Outcome) -> Iterator[StoredField]:
        """`self.sinks[job.id] = sink`: `finish(job)` strikes the job and its sink off, `abort(id)` the
        job alone."""
        function = outcome.function
        paths = {path for _, path in outcome.stored}
        if function.cls is None or len(paths) != 1 or outcome.acquisition.foreign:
            return
        (path,) = paths
        if path[0] != function.owner or path[2:] != (ANY_ITEM,) or not _under_a_record(function, path[1][1:]):
            return
        table, family = path[1][1:], list(self.family_of(function.cls))
        place = RecordPlace((), frozenset({table}), "", "", True)
        ending = [each for each in family if self._gives_back_there(outcome, place, each)]
        records = [set(taken_out_of(each)) - {table} for each in ending]
        together = set.intersection(*records) if records else set()
        for method in family if together else ():
            over = split(method.name)[0] in OVER and takes_from(method, together)
            if not over or not any(ENDING.search(last_name(call)) for call in method.calls):
                continue
            near = (method, *own_helpers(method, family), *callers(self.project, method))
            if not any(f".{table}" in each.text for each in near):
                field = Field(function.cls.qualname, f"{table}{ANY_ITEM}")
                yield StoredField(field, outcome.lease.span, partly_by=(method.qualname,))
                return

    def _beside(self, tables: Set[str]) -> Iterator[tuple[Outcome, RecordPlace]]:
        """What lies in the records of these tables."""
        for other in self.wanted:
            place = self._record_place(other)
            if place is not None and place.tables & tables:
                yield other, place

    def _goes_on(self, method: Function, tables: Set[str], sayers: Sequence[Function]) -> bool:
        """The record goes to others, or another one takes its place; or whoever counts is told of it:
        `self.gone += 1`."""
        taken = {name for table in tables for name in _taken_out(method, table)}
        told = (call for call in method.calls if taken & {getattr(each, "id", "") for each in call.args})
        others = (call for call in told if last_name(call) not in LOGGING | SAYING)
        if any(not self.recogniser.calls.targets(method, call)[0] for call in others):
            return True
        if not tables.isdisjoint(_entered(method)) or any(any(put_into(method, name)) for name in taken):
            return True
        changed = {*_counted_up(method)} - tables
        return any(_reads(each, changed) for each in sayers)

    def _both_end(self, other: Outcome, place: RecordPlace, methods: Sequence[Function]) -> bool:
        return all(self._gives_back_there(other, place, method) for method in methods)


def _entered(function: Function) -> Iterator[str]:
    """Tables of the own object into which it puts what it made."""
    for target, value in assignments(function):
        if isinstance(target, ast.Name):
            yield from put_into(function, target.id)
        elif isinstance(target, ast.Subscript) and isinstance(value, ast.Call):
            table = own_attribute(target.value, function.owner or "")
            yield from () if table is None else (table,)


def _taken_out(method: Function, table: str) -> Iterator[str]:
    """`visit` of `visit = self.visits.pop(card)`, or `self.visits[card]`."""
    for target, value in assignments(method):
        match target, value:
            case ast.Name(id=name), ast.Subscript(value=its) | ast.Call(func=ast.Attribute(value=its)):
                if own_attribute(its, method.owner or "") == table:
                    yield name


def _counted_up(method: Function) -> Iterator[str]:
    """Fields of the own object that it adds something to."""
    own = method.owner or ""
    for node in method.statements:
        if isinstance(node, ast.AugAssign) and (field := own_attribute(node.target, own)) is not None:
            yield field
    for call in method.calls:
        at = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if last_name(call) in PUTTING and (field := own_attribute(at, own)) is not None:
            yield field


def _reads(method: Function, fields: Set[str]) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in fields
        for node in method.nodes
    )


def says_end(method: Function, names: Set[str], family: Sequence[Function]) -> bool:
    """It, or a helper of its own, or one of that, calls what gives one back."""
    asked, more = {method.name}, [method]
    while more:
        each = more.pop()
        if any(last_name(call) in names for call in each.calls):
            return True
        called = {own_attribute(call.func, each.owner or "") for call in each.calls}
        more += [helper for helper in family if helper.name in called - asked]
        asked |= {helper.name for helper in more}
    return False


def _under_a_record(function: Function, table: str) -> bool:
    """`self.sinks[job.id]`: the key is read off what the method is told."""
    return any(
        own_attribute(target.value, function.owner or "") == table
        and isinstance(target.slice, ast.Attribute)
        and getattr(target.slice.value, "id", "") in function.parameters[1:]
        for target, _ in assignments(function)
        if isinstance(target, ast.Subscript)
    )


def own_helpers(method: Function, family: Sequence[Function]) -> Iterator[Function]:
    called = {own_attribute(call.func, method.owner or "") for call in method.calls}
    return (each for each in family if each.name in called)
