"""Leases kept in fields: who releases them, who drops them, who else is handed them.

Methods of the class's family are asked by following the field from their entry on. Other functions reach
the field through objects of unknown type, so there the attribute's name decides, and any release of
something so named counts: a missed leak is better than a false one."""

import ast
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial

from auditor.flow.effects import Fate, Value
from auditor.flow.lease import Field, Leak, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.ir.ops import ANY_ITEM, RESULT, Leave, Path
from auditor.model import Span
from auditor.project.code.entered import ENTERS, EXITS
from auditor.project.code.field_paths import in_anothers_table, mentions, own_field, shortened
from auditor.project.code.modules import Class, Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.at_birth import lost_after_birth
from auditor.project.fields.cleared_beside_others import clears_beside_others
from auditor.project.fields.closed_in_part import closed_in_part
from auditor.project.fields.counts_at_ends import CountsAtEnds, says_end
from auditor.project.fields.dropped_with_its_table import dropped_with_its_table
from auditor.project.fields.elsewhere import Elsewhere
from auditor.project.fields.ends_others_alone import ends_others_alone
from auditor.project.fields.ends_without import left_by_an_end
from auditor.project.fields.entered_one_by_one import asks_what_others_set, gone_through_by_all, noted_in
from auditor.project.fields.flag_turned import with_its_flag_turned
from auditor.project.fields.flags_down_at_birth import ended_under_a_flag
from auditor.project.fields.forgetting import (
    CLEANUP,
    CLOSING,
    DISCARDING,
    INITIAL,
    asks_or_releases,
    escaped_by_name,
    forgets,
    shared,
    strikes_off_what_it_freed,
)
from auditor.project.fields.in_its_hands import stays_in_its_hands
from auditor.project.fields.in_others import gathered_only, only_filled
from auditor.project.fields.in_records import Records
from auditor.project.fields.left_by_the_other_end import left_by_the_other_end
from auditor.project.fields.left_in_line import left_in_line
from auditor.project.fields.lists_on_records import cut_on_records
from auditor.project.fields.lost_first import overwritten_as_well
from auditor.project.fields.making_room import thrown_out
from auditor.project.fields.moved_to import moved_to, put_over_there
from auditor.project.fields.noted_marks import lists_entries, places_noting
from auditor.project.fields.one_end_forgets import callers
from auditor.project.fields.other_words import properties_of
from auditor.project.fields.over_in_records import over_in_records
from auditor.project.fields.parked import lost_in, parked_in
from auditor.project.fields.part_forgotten import part_forgotten
from auditor.project.fields.permits_in_line import lost_in_line
from auditor.project.fields.pools_anew import begins_its_pool_anew
from auditor.project.fields.put_aside import put_aside
from auditor.project.fields.put_out import put_out_by
from auditor.project.fields.reckoning import LOCKING, OPENING, takes_out
from auditor.project.fields.reconnecting import refilled_by_a_handler, refilled_in_its_handler
from auditor.project.fields.refillers import without_refillers
from auditor.project.fields.refilling import filled
from auditor.project.fields.replaced_together import ends_another_first
from auditor.project.fields.replacing import asks_whether_there_is_one, works_with_the_last
from auditor.project.fields.stand_ins import stands_for_nothing
from auditor.project.fields.struck_off_and_ended import ends_whom_it_strikes_off
from auditor.project.fields.table_entries import lying_in_tables
from auditor.project.fields.tables_on_records import emptied_on_records
from auditor.project.fields.told_not_to_own import told_not_to_own
from auditor.project.fields.told_once import told_where_it_is_put
from auditor.project.fields.told_when_over import told_when_over
from auditor.project.meaning.own_pools import taken_at_birth
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import EffectsOf, Summaries
from auditor.project.outcome import Outcome, has_gone_to_the_caller, lie_together, on_other_ways

STEPS = frozenset({"forward", "__call__", "step", "decode", "encode", "prefill", "run_step", "execute",
                   "train_step", "__next__", "__anext__",
                   "forward_step", "call", "process", "update", "training_step", "generate"})  # fmt: skip
"""Methods that are called once a step, so that what they store is stored again."""


class Fields(CountsAtEnds):
    def __init__(
        self,
        project: Project,
        summaries: Summaries,
        effects_of: EffectsOf,
        recogniser: Recogniser,
    ) -> None:
        super().__init__(project, summaries, effects_of, recogniser)
        self.pools = recogniser.pools
        self.elsewhere = Elsewhere(project, frozenset())
        self.begun: Set[tuple[Class | None, str]] = frozenset()  # fields that `__init__` puts a lease into

    def stored(self, outcomes: Iterable[Outcome]) -> dict[int, tuple[StoredField, ...]]:
        """For each outcome (by id of its call) the fields of its own object that it was stored in. An object
        that holds something open may be kept as long as its keeper: of it, what is put over it is asked."""
        outcomes = list(outcomes)
        wanted = [lying_in_tables(outcome) for outcome in outcomes if not _may_be_kept(outcome)]
        self.wanted = wanted
        self.takings = []
        self.places = {}
        attributes = frozenset(
            path[1][1:]
            for outcome in wanted
            for path in (*(path for _, path in outcome.stored), *outcome.beside)
            if own_field(outcome.function, path)
        )
        owners = {outcome.function.cls for outcome in wanted if outcome.stored or outcome.beside}
        methods = [method for cls in owners if cls is not None for method in self.family_of(cls)]
        attributes |= frozenset().union(*(properties_of(methods, attribute) for attribute in attributes))
        self.elsewhere = Elsewhere(self.project, attributes)
        self.begun = {
            (outcome.function.cls, path[1][1:])
            for outcome in wanted
            if outcome.function.name == "__init__"
            for _, path in outcome.stored
            if len(path) == 2 and own_field(outcome.function, path)
        }
        found: dict[int, tuple[StoredField, ...]] = {}
        for outcome in wanted:
            if fields := self._known_of(outcome):
                found[id(outcome.call)] = fields
        for outcome in outcomes:
            lost = tuple(self._lost_though_open(outcome)) if _may_be_kept(outcome) else ()
            if lost:
                found[id(outcome.call)] = lost
        records = Records(self.project, self.model, self.recogniser)
        for outcome, forgotten in records.forgotten(wanted):
            found[id(outcome.call)] = (*found.get(id(outcome.call), ()), forgotten)
        for outcome, kept_by_none in told_not_to_own(records, wanted):
            found[id(outcome.call)] = (*found.get(id(outcome.call), ()), kept_by_none)
        for outcome, ended_in_part in closed_in_part(records, wanted):
            found[id(outcome.call)] = (*found.get(id(outcome.call), ()), ended_in_part)
        found |= overwritten_as_well(wanted, found)
        return told_where_it_is_put(wanted, found, self.recogniser.calls)

    def _known_of(self, outcome: Outcome) -> tuple[StoredField, ...]:
        if taken_at_birth(outcome.call, outcome.function):
            return ()
        at = outcome.lease.span
        with self.project.confessing(at.path, at.line):
            return self._with_forgotten(outcome, tuple(self._fields_of(outcome)))
        return ()

    def _with_forgotten(self, outcome: Outcome, fields: tuple[StoredField, ...]) -> tuple[StoredField, ...]:
        """These, and where nothing is said of them what some end or another method forgets."""
        if not all(map(is_seen_to, fields)):
            return fields
        fields += (
            tuple(self._forgotten_by_another_end(outcome))
            or tuple(self._still_on_it(outcome))
            or tuple(self._forgotten_on_a_way(outcome))
            or tuple(self._set_to_none(outcome))
            or tuple(self._under_a_flag(outcome, fields))
        )
        fields += (*self._left_counted(outcome), *self._kept_when_refused(outcome))
        fields += (*self._left_in_its_table(outcome), *self._with_its_flag_turned(outcome))
        fields += tuple(self._lost_on_records(outcome)) if not fields else ()
        fields += tuple(self._left_by_an_end(outcome)) if not fields else ()
        fields += tuple(self._left_by_the_other(outcome, fields))
        fields += tuple(self._left_in_line(outcome)) if not fields else ()
        fields += tuple(dropped_with_its_table(outcome, fields, self.project))
        fields += tuple(self._lost_in_line(outcome)) if not fields else ()
        fields += tuple(self._part_forgotten(outcome))
        return fields + tuple(put_aside(outcome, partial(self._known_releases, outcome)))

    def _lost_though_open(self, outcome: Outcome) -> Iterator[StoredField]:
        """What is put over it, or where a method takes it out of a table and ends it on other ways only."""
        yield from self._over_another(outcome)
        cls = outcome.function.cls
        for _, path in outcome.stored:
            if cls is None or path[2:] != (ANY_ITEM,) or not own_field(outcome.function, path):
                continue
            family = list(self.family_of(cls))
            enders = [
                each
                for each in family
                if each.parameters and self._asked(outcome, each, path).fate is Fate.RELEASE
            ]
            drops = [drop for each in enders for drop in self._lost_entries(outcome, family, each, path)]
            if drops:
                where = Field(cls.qualname, "".join(path[1:])[1:])
                names = tuple(each.qualname for each in enders)
                yield StoredField(where, outcome.lease.span, names, drops=tuple(drops))

    def _with_its_flag_turned(self, outcome: Outcome) -> Iterator[StoredField]:
        if (cls := outcome.function.cls) is not None:
            yield from with_its_flag_turned(
                outcome, list(self.family_of(cls)), lambda each: self._known_releases(outcome, each)
            )

    def _left_by_an_end(self, outcome: Outcome) -> Iterator[StoredField]:
        if (cls := outcome.function.cls) is not None:
            known = partial(self._known_releases, outcome)
            yield from left_by_an_end(outcome, list(self.family_of(cls)), self.project, known)

    def _left_by_the_other(self, outcome: Outcome, fields: Sequence[StoredField]) -> Iterator[StoredField]:
        if (cls := outcome.function.cls) is not None:
            family, calls = list(self.family_of(cls)), self.recogniser.calls
            yield from left_by_the_other_end(outcome, fields, family, self.project, calls)

    def _left_in_line(self, outcome: Outcome) -> Iterator[StoredField]:
        known = self._known_releases(outcome, outcome.function)
        for left in left_in_line(outcome, known):
            if any(True for _ in self._ending(outcome, left.field.path)):
                yield left

    def _lost_in_line(self, outcome: Outcome) -> Iterator[StoredField]:
        if (cls := outcome.function.cls) is not None:
            known = partial(self._known_releases, outcome)
            yield from lost_in_line(outcome, list(self.family_of(cls)), known)

    def _part_forgotten(self, outcome: Outcome) -> Iterator[StoredField]:
        if (cls := outcome.function.cls) is not None and not outcome.acquisition.foreign:
            family, ends = list(self.family_of(cls)), self._ends(outcome)
            yield from part_forgotten(outcome, self.wanted, family, self._asked_of, ends)

    def _lost_on_records(self, outcome: Outcome) -> Iterator[StoredField]:
        if (cls := outcome.function.cls) is not None:
            ends = self.recogniser.ending_names(outcome.acquisition.protocol)
            family, known = list(self.family_of(cls)), partial(self._known_releases, outcome)
            yield from emptied_on_records(outcome, family, self.project, known, ends)
            yield from cut_on_records(outcome, family, self.project)

    def _over_in_records(self, outcome: Outcome) -> Iterator[StoredField]:
        around = self._those_around(outcome.function)
        yield from over_in_records(
            outcome, around, self.project, lambda each: self._known_releases(outcome, each)
        )

    def _fields_of(self, outcome: Outcome) -> Iterator[StoredField]:
        seen: set[Path] = set()
        self.whole = {shortened(path): path for _, path in outcome.stored}
        for node, path in (*outcome.stored, *on_other_ways(outcome)):
            path = shortened(path)
            if path in seen or not own_field(outcome.function, path) or self._of_the_pool(outcome):
                continue
            seen.add(path)
            if not stands_for_nothing(outcome, path, self._those_around(outcome.function)):
                yield self._judged(outcome, node, path)
                yield from (
                    *self._lost_further_on(outcome, path),
                    *self._lost_where_it_is_moved(outcome, path),
                )
        yield from (*self._of_known_objects(outcome), *self._listed_with_it(outcome))
        yield from (*self._of_given_objects(outcome), *self._over_in_records(outcome))
        if not outcome.stored:
            yield from self._entered(outcome)
            yield from self._lost_of_the_noted(outcome)
            yield from (*self._recorded(outcome), *self._forgotten_keys(outcome))
            yield from self._lost_with_its_key(outcome)
        yield from (*self._over_another(outcome), *self._nothing_over_it(outcome))

    def _lost_where_it_is_moved(self, outcome: Outcome, path: Path) -> Iterator[StoredField]:
        """Of what the tree's own pools lent, and another method moves from this field to another place."""
        acquisition, cls = outcome.acquisition, outcome.function.cls
        if len(path) != 2 or cls is None or acquisition.foreign or acquisition.keyed or outcome.unknown:
            return
        family = list(self.family_of(cls))
        for place in sorted({to for _, _, to in moved_to(family, outcome.function, path[1][1:])}):
            there = (path[0], *place[1:])
            self.noted = frozenset({there})  # it is in the field no more
            released_by, escapes, drops = self._fate(outcome, family, there)
            self.noted = frozenset()
            if released_by and drops and not escapes:
                where = Field(cls.qualname, "".join(place[1:])[1:])
                yield StoredField(where, outcome.lease.span, tuple(released_by), drops=tuple(drops))
        for filling in put_over_there(family, outcome.function, path[1][1:]):
            there = (path[0], f".{filling.field}")
            enders = [each for each in family if self._asked(outcome, each, there).fate is Fate.RELEASE]
            if enders and not self._in_step(filling, enders):
                yield filled(filling, enders)

    def _recorded(self, outcome: Outcome) -> Iterator[StoredField]:
        """What is shown to callers and kept in a table as well, where that is filled again, or emptied for
        good, or loses an entry though the class gives back the others."""
        own = [path for path in outcome.beside if own_field(outcome.function, path)]
        self.whole |= {shortened(path): path for path in own}
        paths = {shortened(path) for path in own}
        if not (outcome.returned is not None or outcome.unknown) or self._of_the_pool(outcome):
            return
        ops = outcome.function.graph.ops
        way_out = next((node for node, op in enumerate(ops) if isinstance(op, Leave)), 0)
        for path in sorted(paths):
            described = self._describe(outcome, way_out, path)
            ended = described.released_by or described.partly_by or described.escapes
            forgotten = (outcome.shown or (outcome.recorded and described.drops)) and not ended
            if forgotten and any(True for _ in self._ending(outcome, path[1][1:])):
                continue
            entered = (
                (outcome.function.name in ENTERS or _left_by_exits(described))
                and described.partly_by
                and not described.escapes
            )
            if forgotten or entered or described.overwrite or self._loses_entries(outcome, described):
                yield described

    def _judged(self, outcome: Outcome, node: int, path: Path) -> StoredField:
        """By the field that is released, where two hold it: a stream's reader and its writer."""
        first = self._describe(outcome, node, path)
        if first.released_by or first.escapes:
            return first
        if len(path) != 2 and path[2:] != (ANY_ITEM,):
            return self._by_its_records(outcome, node, path) or first
        if path[2:] == (ANY_ITEM,):
            return self._by_another_table(outcome, node, path) or first
        if RESULT in outcome.beside and LOCKING.match(outcome.function.name):
            return replace(first, escapes=True)  # `fd = self._lock_file()`: the caller unlocks what he gets
        if any(other[0].startswith("@") for other in outcome.beside):
            return replace(first, escapes=True)  # a list of the module has it as well
        if outcome.acquisition.value is Value.INDEX and any(map(in_anothers_table, outcome.beside)):
            return replace(first, escapes=True)  # `self.tables.write(row, numbers)`: freed by their row
        for other in sorted({shortened(other) for other in outcome.beside} - {path}):
            wrapped = len(other) == 3 and other[-1] == ANY_ITEM  # `self.stream = Stream(self.socket)`
            apart = not lie_together(outcome, path, other)
            if (len(other) == 2 or wrapped) and own_field(outcome.function, other) and not apart:
                described = self._describe(outcome, node, other)
                if described.released_by or described.escapes:
                    return described
        return first

    def _by_its_records(self, outcome: Outcome, node: int, path: Path) -> StoredField | None:
        """`self.by_name[name] = entry`, `self.newest = entry`: who ends those of the table sees to it."""
        own = [each for each in outcome.beside if own_field(outcome.function, each) and each[-1] == path[-1]]
        tables = {shortened(each): each for each in own if each[2:3] == (ANY_ITEM,)}
        self.whole |= tables
        return self._by_another_table(outcome, node, path) if tables else None

    def _by_another_table(self, outcome: Outcome, node: int, path: Path) -> StoredField | None:
        """`self.rows[key] = cell`, `self.order.append(cell)`: who goes over the one sees to those of both."""
        for other in sorted({shortened(each) for each in outcome.beside} - {path}):
            near = own_field(outcome.function, other) and lie_together(outcome, path, other)
            if other[2:] == (ANY_ITEM,) and near:
                described = self._describe(outcome, node, other)
                if described.released_by and not described.drops:
                    return described
        return None

    def _of_the_pool(self, outcome: Outcome) -> bool:
        """What a pool takes from itself, such as a block that stands for nothing, it keeps for its life; not
        what a method of it gets from another one."""
        function, op = outcome.function, outcome.call.func
        own = (
            isinstance(op, ast.Attribute) and isinstance(op.value, ast.Name) and op.value.id == function.owner
        )
        lender = outcome.acquisition.protocol.partition(".")[0]
        its = function.cls is not None and any(c.name == lender for c in self.model.lineage(function.cls))
        return own and its and function.cls in self.pools

    def _entered(self, outcome: Outcome) -> Iterator[StoredField]:
        """A lock that `__enter__` takes and `__exit__` gives back on some ways only."""
        function = outcome.function
        path = gone_through_by_all(function, outcome.acquisition.places[0])
        if not (outcome.acquisition.keyed and function.name in ENTERS):
            return
        if not own_field(function, path):
            yield from self._entered_one_by_one(outcome, path)
            return
        assert function.cls is not None
        family = list(self.family_of(function.cls))
        released_by = self._in_force(function.cls, self._fate(outcome, family, path)[0])
        partly = [name for name in released_by if self._only_partly(outcome, family, path, name)]
        if path[2:] == (ANY_ITEM,) and asks_what_others_set(family, partly):
            return
        if partly and partly == released_by:
            field = Field(function.cls.qualname, "".join(path[1:])[1:])
            yield StoredField(field, outcome.lease.span, partly_by=tuple(partly))

    def _under_a_flag(self, outcome: Outcome, fields: Sequence[StoredField]) -> Iterator[StoredField]:
        cls = outcome.function.cls
        family = list(self.family_of(cls)) if cls is not None else []
        for stored in fields:
            yield from ended_under_a_flag(outcome, stored, family)

    def _entered_one_by_one(self, outcome: Outcome, key: Path) -> Iterator[StoredField]:
        """`table.pin(key)` and `self.pinned.append(key)` in `__enter__`, and an `__exit__` that passes some
        over."""
        ops = outcome.function.graph.ops
        way_out = next((node for node, op in enumerate(ops) if isinstance(op, Leave)), 0)
        for path in sorted(set(noted_in(outcome.function, outcome.call, key))):
            described = self._describe(outcome, way_out, path)
            partly = described.partly_by and not described.released_by
            if not described.escapes and (described.drops or partly):
                yield described

    def _lost_of_the_noted(self, outcome: Outcome) -> Iterator[StoredField]:
        """`self.pinned.append(key)` of a key that is pinned: what one method of the class lets go of, or
        passes over, where others are given back."""
        cls = outcome.function.cls
        if cls is None or outcome.acquisition.foreign or self._of_the_pool(outcome):
            return
        for whole in sorted(places_noting(outcome)):
            short = shortened(whole)
            self.whole[short], self.noted = whole, frozenset({short})
            released_by, escapes, drops = self._fate(outcome, list(self.family_of(cls)), short)
            self.noted = frozenset()
            by_itself = not any(piece.startswith(".") for piece in whole[2:])
            otherwise = {
                drop.at
                for drop in drops
                if self._said_otherwise(outcome, drop, short[1][1:], by_itself=by_itself)
            }
            drops = [drop for drop in drops if drop.at not in otherwise]
            self.takings = [each for each in self.takings if each.span not in otherwise]
            if released_by and drops and not escapes:
                where = Field(cls.qualname, "".join(short[1:])[1:])
                yield StoredField(where, outcome.lease.span, tuple(released_by), drops=tuple(drops))

    def _said_otherwise(self, outcome: Outcome, drop: Leak, table: str, *, by_itself: bool) -> bool:
        """`self.live.pop(job.id)`, and `self._end(job)`, which gives back what the job marks; so may whoever
        calls the method, or gets a list of what goes. Where all entries go, or records of which each may say
        whether it marks anything, the method itself may give back what they mark."""
        cls = outcome.function.cls
        family = list(self.family_of(cls)) if cls is not None else []
        names = self.recogniser.ending_names(outcome.acquisition.protocol)
        for method in (each for each in family if each.module.path == drop.at.path):
            if method in method.module.functions_at([drop.at.line]):
                own = any(last_name(call) in names for call in method.calls)
                if own or says_end(method, names, family):
                    return not (own and drop.parted and by_itself)
                asking = callers(self.project, method)
                return lists_entries(method, table) or any(says_end(each, names, ()) for each in asking)
        return False

    def _describe(self, outcome: Outcome, node: int, path: Path) -> StoredField:
        function = outcome.function
        cls = function.cls
        assert cls is not None
        family = list(self.family_of(cls))
        released_by, escapes, drops = self._fate(outcome, family, path)
        attribute = path[1][1:]
        escapes = escapes or self._ended_by_others(outcome, family, path) or self.elsewhere.taken_out(path)
        escapes = escapes or self._left_for_others(outcome, family, path)
        partly = [name for name in released_by if self._only_partly(outcome, family, path, name)]
        in_force = self._of_itself(cls, self._in_force(cls, released_by), partly)
        released_by = [name for name in in_force if name not in partly]
        entered = function.name in ENTERS and bool(partly) and not released_by
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)
        if partly:
            released_by = without_refillers(released_by, family, function, outcome.call, attribute, ends)
        for other in sorted(properties_of(family, attribute)):
            by_methods = self._fate(outcome, family, (path[0], f".{other}", *path[2:]))[0]
            released_by += [*by_methods, *self.elsewhere.releasing(cls, other)]
        released_by += [name for name in self.elsewhere.releasing(cls, attribute) if name not in released_by]
        if not released_by and self.elsewhere.of_one_class(attribute):
            released_by += self._ended_through(outcome, attribute)
        released_by += self._ended_by_itself(family, path)
        if not (released_by or escapes or partly) and len(path) == 2:
            popping = [each for each in family if f".{attribute}.pop" in each.text]
            released_by += self._fate(outcome, popping, (*path, ANY_ITEM))[0]  # `pool.put(self.pages.pop())`
        released_by += put_out_by(family, self.whole.get(path, path), ends)
        if not escapes and self._ended_for_the_next(outcome, family, path, released_by):
            partly = partly or self._closed_without(outcome, family, path)
            released_by = [] if partly else released_by
        if escapes and not released_by and self._only_moved(outcome, family, path):
            partly = partly or self._closed_without(outcome, family, path)
            escapes = not partly
        if entered and EXITS & {name.rpartition(".")[2] for name in partly}:
            released_by, escapes = [], False  # whatever else ends it, or takes it out, does so before
        op = function.graph.ops[node]
        at = (
            outcome.lease.span
            if isinstance(op, Leave)
            else span_of(function.module.path, op.at, function.module.lines)
        )
        return StoredField(
            field=Field(cls.qualname, "".join(path[1:])[1:]),
            at=at,
            released_by=tuple(released_by),
            partly_by=tuple(partly),
            cleanups=tuple(sorted({m.name for m in family if CLEANUP.fullmatch(m.name)})),
            drops=tuple(drops),
            overwrite=self._overwrite(outcome, path, at, bool(released_by))
            or self._again(outcome, family, path),
            escapes=escapes,
        )

    def _ended_by_itself(self, family: list[Function], path: Path) -> list[str]:
        """`Link.close` of `self.side.writer`, which the class may have forgotten to call."""
        names = list(self.elsewhere.of_its_own(path))
        ends = {name.rpartition(".")[2] for name in names}
        return [] if ends_others_alone(self.project, family, path[1][1:], ends) else names

    def _left_for_others(self, outcome: Outcome, family: list[Function], path: Path) -> bool:
        """`self.docs.append(Doc(url, extent))`, which nobody of the class reads, and a `write(docs)` that
        gives back the extents of what it is told."""
        inside, attribute = self.whole.get(path, path)[3:], path[1][1:]
        if len(inside) != 1 or attribute.startswith("_") or not gathered_only(family, attribute):
            return False
        return any(each not in family for each in self._ending(outcome, inside[0][1:]))

    def _only_moved(self, outcome: Outcome, family: list[Function], path: Path) -> bool:
        """Methods of the class put what lies in the field into another one, and nobody else comes to it."""
        if len(path) != 2 or has_gone_to_the_caller(outcome) or outcome.unknown:
            return False
        answers = [(each, self._asked(outcome, each, path)) for each in family if each.parameters]
        moved = [place for each, answer in answers for place in answer.stored if place[0] == each.owner]
        known = all(
            answer.fate is Fate.BORROW or (answer.fate is Fate.TAKE and answer.stored)
            for _, answer in answers
        )
        return bool(moved) and known and not self._ended_by_others(outcome, family, path)

    def _fate(
        self, outcome: Outcome, family: list[Function], path: Path
    ) -> tuple[list[str], bool, list[Leak]]:
        released_by: list[str] = []
        drops: list[Leak] = []
        numbers = outcome.acquisition.value is Value.INDEX and path[-1] == ANY_ITEM
        attribute = path[1][1:]
        releasing = (looks_releasing(call) for method in family for call in method.calls)
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)
        copied = numbers and any(releasing) and not self._is_only_filled(outcome, path)
        escapes = in_hands = False
        for method in family:
            escapes = (
                escaped_by_name(method, attribute) or strikes_off_what_it_freed(method, attribute) or escapes
            )
            if method.owner is None or not mentions(method, attribute):
                continue
            escapes = escapes or told_when_over(method, family, attribute)
            if path[-1] == ANY_ITEM and method.name in INITIAL and shared(method, attribute):
                escapes = True
            if path[-1] == ANY_ITEM and ends_whom_it_strikes_off(method, attribute, ends):
                released_by.append(method.qualname)
                continue
            if begins_its_pool_anew(self.recogniser, outcome, method):
                released_by.append(method.qualname)
                continue
            answer = self._asked(outcome, method, path)
            if len(path) > 2:
                drops += self._cut_off(outcome, method, path)
                drops += self._seen_to_in_part(outcome, method, path)
                drops += self._lost_entries(outcome, family, method, path)
            if answer.fate is not Fate.RELEASE:
                drops += self._emptied_inside(outcome, method, path)
            if answer.fate is Fate.RELEASE:
                drops += self._rest_dropped(outcome, family, method, path)
                if self._reachable(method, family):
                    released_by.append(method.qualname)
            elif answer.fate is Fate.TAKE or answer.result is not None:
                passed_over = self._rest_passed_over(outcome, method, path)
                drops += passed_over
                left = self._left_where_it_is_moved(outcome, family, method, path)
                drops += left
                if not (passed_over or left or method is outcome.function):
                    stays = len(path) > 2 and stays_in_its_hands(method, answer, path)
                    in_hands, escapes = in_hands or stays, escapes or not stays
            elif answer.fate is Fate.UNKNOWN and (
                CLEANUP.fullmatch(method.name) or (len(path) > 2 and takes_out(method, attribute))
            ):
                escapes = True
            elif (
                answer.dropped and method is not outcome.function and self._throws_away(outcome, method, path)
            ):
                found = self._drops(method, self._under_its_key(method, path), outcome.acquisition)
                declared = outcome.acquisition.foreign
                sure = not numbers or declared or self._for_good(outcome, method)
                if len(path) > 2 or CLOSING.fullmatch(method.name) or self._resets(outcome, method):
                    drops += [drop for drop in found if sure or drop.holder == "clear"]
            drops += self._emptied(outcome, method, path, answer)
        escapes = escapes or ((copied or in_hands) and not released_by)
        drops = lost_after_birth(self.project, drops, family)
        if path[2:] == (ANY_ITEM,) and released_by and not escapes:
            drops += [self._dropped_at(m, at) for m in family for at in thrown_out(m, attribute, ends)]
        return released_by, escapes, drops

    def _under_its_key(self, method: Function, path: Path) -> Path:
        """`self.legs["near"]`, of which nothing goes where another one is put under `"far"`."""
        whole = self.whole.get(path, path)
        constant = len(whole) > 2 and whole[2][:1] == "[" and whole[2] != ANY_ITEM
        return (method.parameters[0], *(whole[1:3] if constant else path[1:]))

    def _left_where_it_is_moved(
        self, outcome: Outcome, family: list[Function], method: Function, path: Path
    ) -> list[Leak]:
        """Of what the tree's own pools lent, and this table alone has."""
        known = outcome.acquisition.foreign or outcome.acquisition.keyed or path[2:] != (ANY_ITEM,)
        if known or {place[:2] for place in outcome.beside if place != RESULT} - {path[:2]}:
            return []
        attribute, found = path[1][1:], []
        moved = [each for each in parked_in(family, attribute) if each[0] is method]
        enders = [each.name for each in family if self._asked(outcome, each, path).fate is Fate.RELEASE]
        for other in sorted({other for _, _, other in moved}):
            there = (path[0], f".{other}", ANY_ITEM)
            if not any(self._asked(outcome, each, there).fate is Fate.RELEASE for each in family):
                found += lost_in(family, other, attribute, enders)
        return [replace(self._dropped_at(where, at), parted=True) for where, at in found]

    def _throws_away(self, outcome: Outcome, method: Function, path: Path) -> bool:
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)
        all_of_it = CLOSING.fullmatch(method.name) or DISCARDING.fullmatch(method.name)
        attribute = path[1][1:]
        if forgets(method, attribute, ends):
            return True
        places = {attribute, *(place[1][1:] for place in outcome.beside if len(place) > 1)}
        return all_of_it is not None and all(clears_beside_others(method, each, ends) for each in places)

    def _is_only_filled(self, outcome: Outcome, path: Path) -> bool:
        """The number lies in this table alone, and nobody takes one out of that."""
        alone = {place[:2] for place in outcome.beside} <= {path[:2]}
        return alone and only_filled(self.project, path[1][1:])

    def _overwrite(self, outcome: Outcome, path: Path, at: Span, ended: bool) -> Leak | None:
        """A step that stores into the field again, without asking and without giving the last one back."""
        function = outcome.function
        attribute = path[1][1:]
        replaced = self._replaced(outcome, path, at) or self._refilled(function, path, at)
        replaced = replaced or (ended and self._replaced_with_another(outcome, path))
        if replaced or (ended and self._outgrown(outcome, path)):
            return Leak(Loss.OVERWRITTEN, at, ".".join(["self", attribute]), ())
        entered = ended and function.name in ENTERS and self._left_open(outcome, path)
        again = function.name in STEPS or entered or self._renewed(outcome, path)
        if not again or len(path) != 2 or asks_or_releases(function, attribute):
            return None
        last = self._asked(outcome, function, path)
        if last.fate is Fate.RELEASE and not last.dropped:
            return None  # `old, self.buffer = self.buffer, new`, and `old` is given back
        return Leak(Loss.OVERWRITTEN, at, ".".join(["self", attribute]), ())

    def _replaced(self, outcome: Outcome, path: Path, at: Span) -> bool:
        """The method works with what is in the field, puts another one there, and gives nothing back."""
        function, attribute = outcome.function, path[1][1:]
        if len(path) != 2 or outcome.acquisition.foreign or function.name in INITIAL:
            return False
        if not works_with_the_last(function, attribute, at.line):
            return False
        if asks_whether_there_is_one(function, attribute):
            return False
        place = (function.parameters[0], *path[1:])
        return self._lets_go(function, place, outcome.acquisition)

    def _replaced_with_another(self, outcome: Outcome, path: Path) -> bool:
        """What lies in another field the method gives back before it fills both anew."""
        function, attribute = outcome.function, path[1][1:]
        if len(path) != 2 or function.name in INITIAL or asks_whether_there_is_one(function, attribute):
            return False
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)
        place = (function.parameters[0], *path[1:])
        return ends_another_first(function, attribute, ends) and self._lets_go(
            function, place, outcome.acquisition
        )

    def _refilled(self, function: Function, path: Path, at: Span) -> bool:
        family = list(self.family_of(function.cls)) if function.cls is not None else []
        attribute = path[1][1:]
        return len(path) == 2 and (
            refilled_in_its_handler(function, attribute, at.line)
            or refilled_by_a_handler(function, family, attribute, at.line)
        )

    def _renewed(self, outcome: Outcome, path: Path) -> bool:
        """`__init__` has filled the field already, and on some way nobody gives back what it put there."""
        function, attribute = outcome.function, path[1][1:]
        if (function.cls, attribute) not in self.begun or OPENING.match(function.name):
            return False
        assert function.cls is not None
        if function.name in INITIAL or CLEANUP.fullmatch(function.name):
            return False
        family = list(self.family_of(function.cls))
        callers = [m for m in family if any(last_name(call) == function.name for call in m.calls)]
        if any(m.name in INITIAL or asks_or_releases(m, attribute) for m in callers):
            return False
        place = (function.parameters[0], *path[1:])
        return any(True for _ in self._drops(function, place, outcome.acquisition))


def _left_by_exits(stored: StoredField) -> bool:
    """Whatever callers are shown, the object keeps it until its `with` is left."""
    names = {name.rpartition(".")[2] for name in stored.partly_by}
    return names <= EXITS and not stored.released_by


def is_seen_to(stored: StoredField) -> bool:
    """Nothing is said of it yet."""
    return stored.escapes or (bool(stored.released_by) and not (stored.drops or stored.overwrite))


def _may_be_kept(outcome: Outcome) -> bool:
    """An object that holds something open, a file or a client, and any that its keeper begins with: it may
    last as long as that. What a pool of the tree lends otherwise, comes back."""
    lasting = outcome.acquisition.declared or outcome.function.name == "__init__"
    return outcome.acquisition.opened and lasting
