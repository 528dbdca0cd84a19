"""Two ends of the same records, of which one forgets a lease that the other gives back: `finish(name)` takes
the job out of `self.running` and gives back its nodes and its port, `preempt(name)` its nodes only. Both are
followed from their entry on, through the helpers that they hand the record to. What no method gives back is
forgotten by the one that gives back what lies beside it."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.flow.follow import Followed
from auditor.flow.lease import Loss, StoredField
from auditor.ir.calls import LOGGING
from auditor.ir.ops import RESULT, Call, Path, Store
from auditor.project.code.bindings import assignments, given_to_field, told_by_position
from auditor.project.code.modules import Function, last_part
from auditor.project.fields.comes_by_both import comes_by_both, reads_beside
from auditor.project.fields.forgetting import HANDING_ON, INITIAL
from auditor.project.fields.noted_keys import places_of_key
from auditor.project.fields.nothing_over import NothingOver
from auditor.project.fields.numbered_by_the_lease import gives_back_its_number
from auditor.project.fields.one_end_forgets import OVER, callers, is_over
from auditor.project.fields.record_places import (
    RecordPlace,
    kept_in_tables,
    put_into,
    record_place,
    tables_filled,
    taken_out_of,
    takes_from,
    without_shown_records,
)
from auditor.project.fields.ways_out import SAYING, WayOut, goes_out_of_hand
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


class RecordEnds(NothingOver):
    """Asks each method that ends such records what it does with each of their leases."""

    places: dict[int, RecordPlace | None]

    def _forgotten_by_another_end(self, outcome: Outcome) -> Iterator[StoredField]:
        place = self._record_place(outcome)
        cls = outcome.function.cls
        if place is None or cls is None or outcome.acquisition.foreign:
            return
        siblings = self._siblings(outcome, place)
        family = list(self.family_of(cls))
        enders = [method for method in family if siblings and self._gives_back_there(outcome, place, method)]
        if outcome.function in enders and self._is_another(outcome, place):
            return
        held = outcome.function, outcome.lease.holder, place.tables, self._ends(outcome)
        ended = bool(enders) or (bool(siblings) and not self._is_for_others(place, family))
        for method in (*family, *self._strangers(place, family)) if ended else ():
            if method is outcome.function or method in enders or not self._may_forget(method, place):
                continue
            alike = self._gives_back_what_came_alike(place, siblings, method)
            if self._puts_another_there(outcome, place, method) or gives_back_its_number(method, *held):
                continue
            if not self._forgets(outcome, place, method, alike):
                continue
            if any(_goes_on(method, its.field[0][1:]) for _, its in siblings):
                continue
            wiped = _wipes(method, place.field[0][1:])
            if place.perhaps and not wiped and self._comes_with_no_more(method, siblings):
                continue
            if not enders and self._may_end_otherwise(method, outcome, place):
                continue
            last = takes_from(method, place.tables) and _no_less_there(place, enders)
            shared = any(
                self._gives_back_there(other, its, method)
                and (last or not enders or any(self._gives_back_there(other, its, ender) for ender in enders))
                for other, its in _where_this_lies(place, siblings)
            )
            if shared and not self._callers_see_to_it(method, place, enders):
                field = place.as_field(cls.qualname)
                yield StoredField(field, outcome.lease.span, partly_by=(method.qualname,))
                return

    def _is_another(self, outcome: Outcome, place: RecordPlace) -> bool:
        """In the place of one that another method put there, of which it is told."""
        places = (self._record_place(each) for each in self.wanted if each.function is not outcome.function)
        return any(
            its is not None and its.field == place.field and its.annotation == place.annotation
            for its in places
        )

    def _puts_another_there(self, outcome: Outcome, place: RecordPlace, method: Function) -> bool:
        """That one is put over what lies there, and tells of it; or the method gives it back as well, and
        takes the record for one that has none."""
        protocol = outcome.acquisition.protocol
        told = (
            its is not None and its.field == place.field
            for each in self.wanted
            if each.function is method and each.acquisition.protocol == protocol
            for its in (self._record_place(each),)
        )
        return any(told) or any(
            (source := self.recogniser.source(method, call)) is not None and source.protocol == protocol
            for value in given_to_field(method, place.field[0][1:])
            for call in walk(value)
            if isinstance(call, ast.Call)
        )

    def _is_for_others(self, place: RecordPlace, family: Sequence[Function]) -> bool:
        """Functions of others read it too: of what no method of its own class gives back they may."""
        field = place.field[0]
        return any(
            function not in family and _reads(function, field[1:])
            for path, _ in self.project.mentioning(field)
            if (module := self.project.module(path)) is not None
            for function in module.by_node.values()
            if function.name != "<module>"
        )

    def _may_end_otherwise(self, method: Function, outcome: Outcome, place: RecordPlace) -> bool:
        """`self.done(page.brush)`, of which nothing is known; `self.slots.release(req.adapter)` of what
        `req.slot = self.slots.acquire(req.adapter)` began."""
        asked = [(call, self.recogniser.calls.targets(method, call)[0]) for call in method.calls]
        helpers = {target for _, targets in asked for target in targets if target.cls is method.cls}
        if any(_reads(each, place.field[0][1:]) for each in (method, *helpers)):
            return True
        told = set(map(last_part, outcome.call.args)) - {""}
        protocol = outcome.acquisition.protocol
        return any(
            not told.isdisjoint(map(last_part, call.args))
            for call, targets in asked
            if any(self.recogniser.ends(target, protocol) for target in targets)
        )

    def _comes_with_no_more(self, method: Function, siblings: Sequence[tuple[Outcome, RecordPlace]]) -> bool:
        """Whoever fills the tables from which the method takes its records fills another of their fields
        there, before they have this one."""
        taken = {*taken_out_of(method)}
        filling = {each for each in self._those_around(method) if not taken.isdisjoint(tables_filled(each))}
        entering = {o.function for o, its in siblings if not taken.isdisjoint(put_into(o.function, its.told))}
        return bool(filling) and filling <= entering

    def _strangers(self, place: RecordPlace, family: Sequence[Function]) -> Iterator[Function]:
        """Methods of other classes that are told such records, by their annotation: `preempt(seq: Sequence)`
        of the scheduler beside `free(seq: Sequence)` of its manager."""
        own = {method.cls for method in family}
        field = place.field[0]
        for module in self.project.parsed() if place.annotation else ():
            if field not in module.text or place.annotation not in module.text:
                continue
            for method in module.by_node.values():
                if method.is_method and method.cls not in own and f"{field} = " in method.text:
                    yield method

    def _siblings(self, outcome: Outcome, place: RecordPlace) -> list[tuple[Outcome, RecordPlace]]:
        """What lies in other fields of the same kind of record."""
        places = ((other, self._record_place(other)) for other in self.wanted if other is not outcome)
        return [(other, its) for other, its in places if its is not None and place.is_of_the_same(its)]

    def _record_place(self, outcome: Outcome) -> RecordPlace | None:
        key = id(outcome)
        if key not in self.places:
            paths = without_shown_records(
                outcome.function, {*(p for _, p in outcome.stored), *outcome.beside}
            )
            paths = paths or set(places_of_key(outcome, self.model))
            function = outcome.function
            kept = kept_in_tables(function, paths) - {()}
            given = outcome.returned is not None and outcome.returned not in kept
            shown = given or any(path[:1] == RESULT for path in paths)
            none = function.cls is None or not paths or shown
            self.places[key] = None if none else record_place(function, paths, self._those_around(function))
        return self.places[key]

    def _starts(self, place: RecordPlace, method: Function) -> Iterator[tuple[Path, ...]]:
        if method.owner is None:
            return
        if place.tables and any(f".{table}" in method.text for table in place.tables):
            yield place.in_tables(method)
        yield from (start for start in place.in_one_of(method) if f"{start[0][1]}." in method.text)
        yield from place.where_told(method)

    def _gives_back_there(self, outcome: Outcome, place: RecordPlace, method: Function) -> bool:
        for start in self._starts(place, method):
            followed = self.followed_all(method, start, outcome.acquisition)
            if followed is not None and followed.endings.released:
                return True
        return False

    def _gives_back_what_came_alike(
        self, place: RecordPlace, siblings: Sequence[tuple[Outcome, RecordPlace]], method: Function
    ) -> bool:
        """Another field of the records of the same table, which came there as this did: `grow(session)` and
        `grow_draft(session)` are told one that somebody else put there."""
        return any(
            its.annotation == place.annotation and its.tables == place.tables and not its.sure
            for other, its in siblings
            if place.tables and self._gives_back_there(other, its, method)
        )

    def _may_forget(self, method: Function, place: RecordPlace) -> bool:
        """Not who hands something on by his name, `detach(job)`, unless he alone has the job: he has it from
        the table, and answers nothing."""
        if method.name in INITIAL or method.is_abstract:
            return False
        answers = (node.value for node in method.statements if isinstance(node, ast.Return))
        silent = all(value is None or isinstance(value, ast.Constant) for value in answers)
        alone = silent and not any(True for _ in place.where_told(method))
        return alone or HANDING_ON.isdisjoint(split(method.name))

    def _forgets(self, outcome: Outcome, place: RecordPlace, method: Function, alike: bool) -> bool:
        """On every way of its own it gives none of them back, and on one it lets go of one."""
        found = False
        for start in self._starts(place, method):
            owner, table, *_ = start[0]
            perhaps = owner == method.owner and table[1:] in place.perhaps
            if perhaps and (
                self._comes_without(outcome, place, table[1:]) or self._is_in_two(place, table[1:], method)
            ):
                continue
            followed = self.followed_all(method, start, outcome.acquisition)
            if followed is None:
                return False
            ends = followed.endings
            if ends.is_somebodys:
                return False
            if any(_is_anywhere_else(path, start, method) for path in ends.stored.values()):
                return False
            told = start[0][0] != method.owner
            if told and any(_overwritten(method, followed)):
                found = True
            elif told:
                found = found or (is_over(method) and takes_from(method, place.tables))
            elif place.sure or alike or split(method.name)[0] in OVER:
                ways = list(left_on(method, followed, start[0][:2]))
                if any(self._is_given_away(method, way) for way in ways):
                    return False
                found = found or bool(ways)
        return found

    def _comes_without(self, outcome: Outcome, place: RecordPlace, table: str) -> bool:
        """Whoever puts such a record into the table gives the lease back first."""
        return any(
            followed is not None and followed.endings.released
            for method in self._those_around(outcome.function)
            for start in place.where_told(method)
            if table in put_into(method, start[0][0])
            for followed in (self.followed_all(method, start, outcome.acquisition),)
        )

    def _is_in_two(self, place: RecordPlace, table: str, method: Function) -> bool:
        """There is another table of such records, which this method leaves alone: what others take out of
        that goes into no further one, `self.everyone.pop(climber.name)`."""
        for other in place.perhaps - {table} if f".{table}" in method.text else ():
            ends = [each for each in self._those_around(method) if takes_from(each, {other})]
            if f".{other}" not in method.text and ends and not any(map(tables_filled, ends)):
                return True
        return False

    def _is_given_away(self, method: Function, way: WayOut) -> bool:
        """`self.after(job)`, of which nothing is known."""
        names = {place[0] for place in way.held.places}
        calls = (op.at for station in way.in_hand if isinstance(op := way.ops[station.node], Call))
        return any(
            any(getattr(given, "id", None) in names for _, given in told_by_position(call))
            and last_name(call) not in LOGGING | SAYING
            and not self.recogniser.calls.targets(method, call)[0]
            for call in calls
        )

    def _callers_see_to_it(self, method: Function, place: RecordPlace, enders: Sequence[Function]) -> bool:
        """By ending it himself, by reading the field, or by asking an end for the same record."""
        names = {ender.name for ender in enders}
        for caller in callers(self.project, method):
            if caller is method:
                continue
            asked = [call for call in caller.calls if last_name(call) == method.name]
            if caller in enders or reads_beside(caller, asked, place.field[0][1:]):
                return True
            for call in caller.calls:
                same = (each for each in asked if set(_told(each)) & set(_told(call)))
                if last_name(call) in names and any(comes_by_both(caller, each, call) for each in same):
                    return True
        return False


def _where_this_lies(
    place: RecordPlace, siblings: Sequence[tuple[Outcome, RecordPlace]]
) -> Iterator[tuple[Outcome, RecordPlace]]:
    """What another class has put into such records lies in them here, too: `job.pages`, which the scheduler
    fills, where `self.jobs[*].port` lies."""
    for other, its in siblings:
        yield other, its
        if its.annotation and its.annotation == place.annotation and its.tables.isdisjoint(place.tables):
            yield other, replace(place, field=its.field)


def _told(call: ast.Call) -> list[str]:
    return list(map(ast.dump, call.args))


def _goes_on(method: Function, field: str) -> bool:
    """`victim.device = pages`: the record gets another lease, and is somebody's after that."""
    return any(
        isinstance(target, ast.Attribute)
        and target.attr == field
        and getattr(target.value, "id", method.owner) != method.owner
        and isinstance(value, ast.Name | ast.Call | ast.Subscript)
        for target, value in assignments(method)
    )


def _no_less_there(place: RecordPlace, enders: Sequence[Function]) -> bool:
    """What is in the table has the lease: those who give it back leave the record there, or take it out as
    well, and who fills the table puts the lease in."""
    taking = [takes_from(ender, place.tables) for ender in enders]
    return not any(taking) or (place.sure and all(taking))


def _wipes(method: Function, field: str) -> bool:
    """`seq.draft = None`, `seq.pages.clear()`: there may have been one."""
    given = ((t, v) for t, v in assignments(method) if isinstance(v, ast.Constant))
    cleared = (call.func.value for call in method.calls
               if isinstance(call.func, ast.Attribute) and call.func.attr == "clear")  # fmt: skip
    return any(
        isinstance(target, ast.Attribute)
        and target.attr == field
        and getattr(target.value, "id", method.owner) != method.owner
        for target in (*(target for target, _ in given), *cleared)
    )


def _reads(function: Function, field: str) -> bool:
    """But for `request.thumbs.clear()`, which looks at nothing."""
    cleared = {
        id(call.func.value)
        for call in function.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "clear"
    }
    return any(
        isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.ctx, ast.Load)
        for node in function.nodes
        if id(node) not in cleared
    )


def _is_anywhere_else(path: Path, start: tuple[Path, ...], method: Function) -> bool:
    """Than where it was, or in a record that nobody but the method has in its hands."""
    at_hand = path[0].isidentifier() and path[0] not in method.parameters
    return not at_hand and path[:2] not in {each[:2] for each in start}


def left_on(method: Function, followed: Followed, table: Path) -> Iterator[WayOut]:
    """Ways on which the method has taken such a record out of the table, and leaves it to nobody."""
    ops = method.graph.ops
    ways = [(node, held) for loss, node, held in followed.endings.lost if loss is not Loss.RAISE]
    ways += [
        (node, held)
        for node in followed.endings.stored
        for held in followed.solution.states[node]
        if goes_out_of_hand(method, ops[node], held)
    ]
    for node, held in ways:
        way = WayOut(method, followed, node, held, table)
        if way.taken is not None:
            yield way


def _overwritten(method: Function, followed: Followed) -> Iterator[bool]:
    for loss, node, _ in followed.endings.lost:
        op = method.graph.ops[node]
        yield loss is Loss.OVERWRITTEN and isinstance(op, Store)
        yield loss is Loss.DROPPED and isinstance(op, Call) and op.method == "clear"
