"""Which fields and tables of leases are filled again, by what the class and its callers tell of the calls."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Acquisition, Fate, Handle
from auditor.flow.lease import Field, Leak, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import own_attribute
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.field_paths import mentions, own_field
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.code.scripts import ends_before_another, is_script
from auditor.project.fields.beside_another_table import known_beside
from auditor.project.fields.cached_again import comes_to_a_cache_again
from auditor.project.fields.drawn_keys import drawn_by_its_callers
from auditor.project.fields.ended_by_others import (
    closed_by_its_base,
    destroyed_with_its_maker,
    ended_as_a_whole,
    has_unknown_base,
    reached_through,
    told_to_its_base,
)
from auditor.project.fields.exits import asks_other_things, begins_always
from auditor.project.fields.filling_again import (
    Filling,
    attributes_before,
    fillings,
    looks_first,
    may_be_called_again,
    moved_on,
    only_says,
)
from auditor.project.fields.forgetting import (
    CLEANUP,
    CLOSING,
    INITIAL,
    emptying,
    escaped_by_name,
    for_good,
    releases_others_only,
)
from auditor.project.fields.forgotten_fields import ForgottenFields
from auditor.project.fields.given_objects import (
    filled_before,
    in_each_step,
    put_in_its_place,
    tables_filled_with,
)
from auditor.project.fields.in_others import Uses
from auditor.project.fields.known_by_callers import (
    made_room_for_by_one,
    refilled_by_who_knows,
    refilled_for_each,
)
from auditor.project.fields.known_keys import (
    is_of_what_it_holds,
    known_elsewhere,
    known_under_it,
    names_a_place,
    only_emptied_as_a_whole,
    plain_table,
    replaces_what_is_known,
)
from auditor.project.fields.known_there import replaced_knowingly
from auditor.project.fields.looked_up import empty_a_record, fields_inside, replaces_what_it_saw
from auditor.project.fields.moved_between import comes_from_another_table
from auditor.project.fields.names_of_refillers import (
    BROUGHT_IN,
    EACH_STEP,
    PREPARING,
    begins_what_ends,
    follows_another,
    goes_forward,
    in_turns,
    is_answered,
)
from auditor.project.fields.new_each_time import (
    is_another_one_each_time,
    is_of_another_now,
    is_of_the_next,
    is_one_of_a_folder,
    is_told_the_path,
    is_told_which_one,
)
from auditor.project.fields.other_words import asked_before_it_is_set
from auditor.project.fields.reckoning import (
    LOCKING,
    SETTING,
    comes_in_pairs,
    looks_and_takes,
    makes_known,
    others_look_first,
    puts_in,
    speaking_for,
    takes_out,
    told_by_its_caller,
    turns_over,
)
from auditor.project.fields.refilled_in_a_loop import refilled_in_a_loop
from auditor.project.fields.round_after_round import only_fills_the_empty, passes_over_the_end
from auditor.project.fields.runs_again import reckons_with_another_turn
from auditor.project.fields.setters import only_fills
from auditor.project.fields.under_one_flag import under_one_flag
from auditor.project.meaning.needs import Question
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import Answer
from auditor.project.outcome import Outcome, has_gone_to_the_caller


class Refilling(ForgottenFields):
    """Asks of a lease that a method of the tree's own pools has stored in a field of its object."""

    wanted: Sequence[Outcome] = ()
    """All of them, of which some say what others leave behind."""

    def _filled_again(self, outcome: Outcome, path: Path) -> Filling | None:
        """The store, where the next call of the method stores there again, and nothing has ended the last."""
        family = list(self.family_of(outcome.function.cls)) if outcome.function.cls is not None else []
        filling = self._blind(outcome, path, family)
        of_a_helper = fillings(outcome.function, path[0], path[1][1:]) if path[2:] == (ANY_ITEM,) else []
        if len(of_a_helper) == 1 and (
            made_room_for_by_one(of_a_helper[0], family)
            or comes_to_a_cache_again(of_a_helper[0], outcome.acquisition, outcome.call)
        ):
            return of_a_helper[0]
        if filling is None or (filling.key is not None and path[-1] != ANY_ITEM):
            return None
        enders = self._enders(outcome, family, path)
        if self._is_prepared(filling, family) and not self._in_step(filling, enders):
            return filling
        if not enders or self._handed_on(outcome, family, path):
            return None
        if filling.key is None and any(goes_forward(filling.method.name, each.name) for each in enders):
            return None
        if replaces_what_it_saw(filling, enders, self._ends(outcome)):
            emptied = empty_a_record(family, fields_inside(outcome, path[:2]))
            return None if emptied or self._in_step(filling, enders) else filling
        knowing = refilled_by_who_knows if filling.key is None else refilled_for_each
        if knowing(filling, self._ends(outcome), family):
            return filling
        decide = self._field_again if filling.key is None else self._key_again
        known = bool(only_says(filling)) or replaced_knowingly(filling, self._ends(outcome), family)
        known = known or self._only_fills(filling, family, enders)
        again = known or decide(filling, outcome, family, enders)
        if again and not self._in_step(filling, enders):
            return filling
        by_turns = (
            turns_over(each, filling, enders, family) for each in family if each is not filling.method
        )
        return filling if filling.key is None and any(by_turns) else None

    def _is_prepared(self, filling: Filling, family: list[Function]) -> bool:
        """`prefetch(key)`, `publish(name)`: what lies there waits for somebody who may not come for it."""
        if not PREPARING.match(filling.method.name):
            return False
        told = len(filling.method.parameters) > 1
        if filling.key is not None:
            told = told_by_its_caller(filling) and plain_table(family, filling.field)
        others = [each for each in family if each is not filling.method and each.name not in INITIAL]
        return told and any(takes_out(each, filling.field) for each in others)

    def _only_fills(self, filling: Filling, family: list[Function], enders: Sequence[Function] = ()) -> bool:
        """Under a key, too, that its callers have from elsewhere."""
        if filling.key is not None:
            told = told_by_its_caller(filling) and plain_table(family, filling.field)
            if not told or drawn_by_its_callers(filling, self.project):
                return False
        return only_fills(filling, family, enders)

    def _pushed_on(self, outcome: Outcome, path: Path, family: list[Function]) -> Filling | None:
        """`self.last = self.current` in each call, and nobody gives back `self.last` before the end."""
        method = outcome.function
        if outcome.acquisition.foreign or len(path) != 2 or not may_be_called_again(method):
            return None
        if method.name in INITIAL or CLEANUP.fullmatch(method.name):
            return None
        for filling in fillings(method, path[0], path[1][1:]):
            for moved in moved_on(filling):
                place = (path[0], f".{moved.field}")
                enders = self._enders(outcome, family, place)
                closed = bool(enders) and all(CLOSING.fullmatch(ender.name) for ender in enders)
                if not closed or looks_first(moved, family) or self._handed_on(outcome, family, place):
                    continue
                if not self._in_step(moved, enders):
                    return moved
        return None

    def _blind(self, outcome: Outcome, path: Path, family: list[Function]) -> Filling | None:
        """The one store of a method that others may call again, where nothing is looked at before."""
        method = outcome.function
        unsure = outcome.acquisition.foreign and not SETTING.match(method.name)
        unsure = unsure and not is_of_the_next(outcome.call, method)
        unsure = unsure and not (
            is_one_of_a_folder(outcome.call, method) or is_told_the_path(outcome.call, method)
        )
        if len(path) > 3 or not may_be_called_again(method):
            return None
        ends = CLEANUP.fullmatch(method.name) and own_field(method, path) and ANY_ITEM not in path
        if method.name in INITIAL or ends:
            return None
        found = fillings(method, path[0], path[1][1:])
        if len(found) != 1 or known_beside(found[0], family):
            return None
        unsure = unsure and not only_fills(found[0], family)
        if (renewed := is_of_another_now(found[0])) or unsure:
            return found[0] if renewed else None
        known = replaced_knowingly(found[0], self._ends(outcome), family)
        known = known or replaces_what_it_saw(found[0], (), self._ends(outcome))
        return found[0] if known or not looks_first(found[0], family) else None

    def _ends(self, outcome: Outcome) -> Set[str]:
        return self.recogniser.ending_names(outcome.acquisition.protocol)

    def _enders(self, outcome: Outcome, family: list[Function], path: Path) -> list[Function]:
        return [method for method in family if self._asked(outcome, method, path).fate is Fate.RELEASE]

    def _handed_on(self, outcome: Outcome, family: list[Function], path: Path) -> bool:
        """Somebody else may have taken it out before the next call."""
        for method in family:
            if escaped_by_name(method):
                return True
            if method is outcome.function or method.owner is None or not mentions(method, path[1][1:]):
                continue
            answer = self._asked(outcome, method, path)
            taken = answer.result is not None and takes_out(method, path[1][1:])
            unsure = answer.fate in (Fate.TAKE, Fate.UNKNOWN)
            if taken or (unsure and not self._is_there_after(outcome, method, path)):
                return True
        return False

    def _is_there_after(self, outcome: Outcome, method: Function, path: Path) -> bool:
        """`self.full.append(self.current)` in a method that puts the next one there, and `depot.read(
        self.current)`, which lends something made of it: the field is no emptier for that."""
        attribute, own = path[1][1:], method.owner or ""
        if len(path) != 2:
            return False
        if any(looks_and_takes(each, outcome.call) for each in fillings(method, own, attribute)):
            return not takes_out(method, attribute)

        def borrowed(function: Function, call: ast.Call, _: ast.AST) -> bool:
            return self.recogniser.source(function, call) is not None

        return Uses(method, borrowed=borrowed).only_works(attribute)

    def _field_again(
        self, filling: Filling, outcome: Outcome, family: list[Function], enders: list[Function]
    ) -> bool:
        """`plan(n)`, which anybody may call twice, as against `begin()` and `start()`."""
        if under_one_flag(filling, enders, family):
            return False
        if _is_exchanged_meanwhile(filling, family, enders):
            return False
        if others_look_first(filling, outcome.call, speaking_for(filling, family, self.model)):
            return True
        if any(in_turns(filling.method.name, ender.name) for ender in enders):
            return False
        if reckons_with_another_turn(filling, enders) or is_of_another_now(filling):
            return True
        if is_another_one_each_time(filling, enders) or is_one_of_a_folder(outcome.call, filling.method):
            return True
        only_closed = all(CLOSING.fullmatch(ender.name) for ender in enders)
        own = not outcome.acquisition.foreign
        if own and only_closed and is_told_which_one(outcome.call, filling.method):
            return True
        if only_closed and has_gone_to_the_caller(outcome):
            return False
        if only_closed and EACH_STEP.match(filling.method.name):
            return True
        return not comes_in_pairs(filling.method.name) or puts_in(filling)

    def _key_again(
        self, filling: Filling, outcome: Outcome, family: list[Function], enders: list[Function]
    ) -> bool:
        if not plain_table(family, filling.field) or comes_from_another_table(filling, family):
            return False
        own = not outcome.acquisition.foreign
        if replaces_what_is_known(filling, family):
            return True
        if own and only_emptied_as_a_whole(filling, family, enders):
            return True
        if own and is_of_what_it_holds(filling):
            return True
        comes = comes_in_pairs(filling.method.name)
        known = speaking_for(filling, family, self.model)
        alike = [each for each in known if not (comes and makes_known(filling, each, family))]
        again = known_elsewhere(filling) or known_under_it(filling)
        again = again or others_look_first(filling, outcome.call, alike)
        shown = has_gone_to_the_caller(outcome)
        return told_by_its_caller(filling) and (again or (not shown and self._comes_again(filling, family)))

    def _comes_again(self, filling: Filling, family: Sequence[Function]) -> bool:
        """By what its key is called, unless each caller draws another one."""
        own = filling.method.owner or ""
        asked = any(own_attribute(node, own) == filling.field for node in attributes_before(filling))
        drawn = drawn_by_its_callers(filling, self.project)
        return names_a_place(filling, family) and not (asked or drawn)

    def _in_step(self, filling: Filling, enders: list[Function]) -> bool:
        """Some caller sees to the end, or to the field, himself, or runs once for each object; or the names
        say that they come in turns. Of files that
        nobody has read their text says so."""
        method, field = filling.method, filling.field
        ending = {ender.name for ender in enders}
        if any(is_answered(method.name, name) for name in ending):
            return True
        looks = rf"\.{field}\b(?!\.(?!\w*(?:{ENDING.pattern}))\w+\()"
        speaks = re.compile(rf"{looks}|\.(?:{'|'.join(sorted(ending - {method.name}))})\(").search
        again = follows_another(method.name, filling.key is not None)
        read = {module.path: module for module in self.project.parsed()}
        for path, text in self.project.mentioning(f"{method.name}("):
            if path not in read:
                if speaks(text):
                    return True
                continue
            for caller in read[path].by_node.values():
                calls_it = any(last_name(call) == method.name for call in caller.calls)
                calls_it = calls_it and not passes_over_the_end(caller, method.name, ending)
                calls_it = calls_it and not (again and only_fills_the_empty(caller, method.name, field))
                if calls_it and is_script(caller):
                    calls_it = ends_before_another(caller, method.name, ending)
                if calls_it and caller is not method and (speaks(caller.own_text) or caller.name in INITIAL):
                    return True
        return False

    def _of_known_objects(self, outcome: Outcome) -> Iterator[StoredField]:
        """`session = self.sessions[key]`, and a field of that is filled: it may have been before. So may that
        of an object which a method is given to renew something of it, or is given in each step."""
        cls = outcome.function.cls
        paths = [path for _, path in outcome.stored if len(path) == 2 and path[1].startswith(".")]
        for path in paths if cls is not None else ():
            if own_field(outcome.function, path):
                continue
            assert cls is not None
            field = path[1][1:]
            family = list(self.family_of(cls))
            filling = self._blind(outcome, path, family)
            enders = list(self._ending(outcome, field)) if filling is not None else []
            if filling is None or not enders or BROUGHT_IN.match(outcome.function.name):
                continue
            admitted = tables_filled_with(self.wanted, outcome, family, path[1])
            before = filled_before(filling, outcome.call, family, enders, admitted)
            if not before and not only_fills(filling, family):
                continue
            if in_each_step(filling, family, enders) or not self._in_step(filling, enders):
                yield filled(filling, enders)
        unsure = outcome.acquisition.foreign or cls is None
        for filling in (
            () if unsure else put_in_its_place(outcome.function, outcome.call, outcome.lease.holder)
        ):
            enders = list(self._ending(outcome, filling.field))
            if enders and not self._in_step(filling, enders):
                yield filled(filling, enders)

    def _emptied(self, outcome: Outcome, method: Function, path: Path, answer: Answer) -> Iterator[Leak]:
        """Where a method puts None over what the tree's own pool lent, and another one would give it back."""
        attribute = path[1][1:]
        lines = emptying(method, attribute) if len(path) == 2 and method is not outcome.function else set()
        if not lines or outcome.acquisition.foreign or outcome.function.cls is None:
            return
        if answer.fate is Fate.RELEASE:
            family = list(self.family_of(outcome.function.cls))
            always = begins_always(outcome.function, outcome.call, attribute)
            lost = always and asks_other_things(method, family, attribute, outcome.call)
        else:
            lost = releases_others_only(method, attribute, looped=True)
        striking = any(
            last_name(call) == method.name
            for function in self._ending(outcome, attribute)
            for call in function.calls
        )
        if lost and not striking and for_good(self.project, method):
            place = (method.parameters[0], *path[1:])
            if answer.dropped or answer.fate is Fate.RELEASE:
                drops = self._drops(method, place, outcome.acquisition)
                yield from (drop for drop in drops if drop.at.line in lines)
            else:
                yield from self._named_and_forgotten(method, place, outcome.acquisition, lines)

    def _named_and_forgotten(
        self, method: Function, place: Path, acquisition: Acquisition, lines: set[int]
    ) -> Iterator[Leak]:
        """`seat, self.seat = self.seat, None`, and nobody is given the seat."""
        endings = self._from_entry(method, place, acquisition)
        if endings is None or endings.is_somebodys or endings.stored:
            return
        if any(loss is not Loss.RAISE for loss, _, _ in endings.lost):
            emptied = (node for node in method.statements if node.lineno in lines)
            yield from (self._dropped_at(method, node) for node in list(emptied)[:1])

    def _again(self, outcome: Outcome, family: list[Function], path: Path) -> Leak | None:
        if self._ended_by_others(outcome, family, path) or self._exchanges(outcome, path[1][1:]):
            return None
        filling = self._filled_again(outcome, path) or self._pushed_on(outcome, path, family)
        if filling is None and not outcome.acquisition.foreign:
            filling = refilled_in_a_loop(outcome, path, family, self.effects_of)
        if filling is None:
            return None
        at = span_of(filling.method.module.path, filling.statement, filling.method.module.lines)
        return Leak(Loss.OVERWRITTEN, at, ast.unparse(filling.target), ())

    def _hands_to_an_end(self, outcome: Outcome, function: Function, call: ast.Call) -> bool:
        """`self.unmatch(node)`, which gives back what it is told."""
        acquisition = outcome.acquisition
        questions = (
            Question(target, (name,), acquisition.value, acquisition.protocol)
            for target in self.recogniser.calls.targets(function, call)[0]
            for position in range(len(call.args))
            if (name := parameter_for(target, position, is_bound(target, call))) is not None
        )
        return any(self.summaries.answer(question).fate is Fate.RELEASE for question in questions)

    def _exchanges(self, outcome: Outcome, field: str) -> bool:
        """`self.last = pool.resize(self.last, n)`, which gives back what it is told."""
        told = (own_attribute(each, outcome.function.owner or "") for each in outcome.call.args)
        return field in told and self._hands_to_an_end(outcome, outcome.function, outcome.call)

    def _ended_by_others(self, outcome: Outcome, family: list[Function], path: Path) -> bool:
        function, attribute = outcome.function, path[1][1:]
        assert function.cls is not None
        if outcome.acquisition.handle is Handle.RECEIVER and LOCKING.match(function.name):
            return True  # a lock made of another: its own release is what ends both
        return (
            destroyed_with_its_maker(outcome.call, function, family)
            or any(reached_through(method, attribute) for method in family)
            or told_to_its_base(function, attribute)
            or closed_by_its_base(self.model.lineage(function.cls), attribute)
            or (has_unknown_base(family) and asked_before_it_is_set(function, attribute, family))
            or any(self._ended_where_told(outcome, family, other) for other in outcome.beside)
            or (len(path) > 2 and ended_as_a_whole(self.recogniser.calls, family, attribute))
        )


def filled(filling: Filling, enders: Sequence[Function]) -> StoredField:
    module, cls = filling.method.module, filling.method.cls
    at = span_of(module.path, filling.statement, module.lines)
    leak = Leak(Loss.OVERWRITTEN, at, ast.unparse(filling.target), ())
    names = tuple(method.qualname for method in enders)
    return StoredField(
        Field(cls.qualname if cls is not None else "", filling.field), at, names, overwrite=leak
    )


def _is_exchanged_meanwhile(filling: Filling, family: Sequence[Function], enders: Sequence[Function]) -> bool:
    """Between `begin()` and `end()` comes `advance()`, which gives back the one that is there, and puts the
    next one in its place: that it looks first says nothing of `begin()`."""
    fillers = [each for each in family if fillings(each, each.owner or "", filling.field)]
    others = [each for each in fillers if each is not filling.method and each.name not in INITIAL]
    paired = any(begins_what_ends(filling.method.name, ender.name) for ender in enders)
    return paired and bool(others) and all(each in enders for each in others)
