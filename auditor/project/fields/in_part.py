"""Methods that end a part of what a field or a container holds, and forget the rest."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from auditor.flow.effects import Fate
from auditor.flow.lease import Field, Leak, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.modules import Function
from auditor.project.fields.by_word import comes_back_by_word
from auditor.project.fields.cutting import cut_off
from auditor.project.fields.emptied_inside import emptied_inside
from auditor.project.fields.entry_ends import Ends, forgotten_by
from auditor.project.fields.families import Families
from auditor.project.fields.flags_left_down import set_at_birth
from auditor.project.fields.forgetting import INITIAL, for_good, gives_back_by_name
from auditor.project.fields.half_emptied import HalfEnd, half_emptied
from auditor.project.fields.noted_keys import tables_noting
from auditor.project.fields.only_refilled import closes_without, only_for_the_next
from auditor.project.fields.partial import (
    gone_over_apart,
    keeps_the_part,
    lists_them,
    popped_in_part,
    rest_dropped,
    taken_apart,
)
from auditor.project.fields.passed_over import passed_over_and_cleared
from auditor.project.fields.renamed_over import renamed_over
from auditor.project.fields.rows_cut import rows_cut
from auditor.project.fields.some_of_a_list import seen_to_in_part
from auditor.project.fields.starred_away import goes_through, starred_away
from auditor.project.fields.swept_in_part import swept_in_part
from auditor.project.meaning.needs import Question
from auditor.project.meaning.several_taken import hands_out_things_in_a_list
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome


class InPart(Families):
    """Asks of each method of a family what of the lease's field it leaves to nobody."""

    def _cut_off(self, outcome: Outcome, method: Function, path: Path) -> list[Leak]:
        found, whole = [*cut_off(self.project, method, path[1][1:])], self.whole.get(path, path)
        of_lists = len(whole) == 3 and not outcome.acquisition.foreign and self._are_lists(outcome, whole)
        if whole[2:4] == (ANY_ITEM, ANY_ITEM) or of_lists:
            found += rows_cut(self.project, method, path[1][1:])
        return [self._dropped_at(method, at) for at in found]

    def _emptied_inside(self, outcome: Outcome, method: Function, path: Path) -> list[Leak]:
        """Of what the tree's own pools lent, and what lies nowhere else."""
        whole, acquisition = self.whole.get(path, path), outcome.acquisition
        apart = acquisition.foreign or acquisition.keyed or outcome.unknown or outcome.returned is not None
        if apart or {place[:2] for place in outcome.beside} - {path[:2]}:
            return []
        over = [self._dropped_at(method, at) for at in renamed_over(self.project, method, path[1][1:])]
        if len(whole) < 4 or over:
            return [replace(each, parted=True) for each in over]
        inner = whole[3][1:] if whole[3].startswith(".") and whole[4:5] == (ANY_ITEM,) else ""
        if not (inner or whole[3] == ANY_ITEM):
            return []
        found = list(emptied_inside(method, path[1][1:], inner))
        good = found and self._ends_nothing_beside(outcome, method)
        return [replace(self._dropped_at(method, at), parted=True) for at in found if good]

    def _ends_nothing_beside(self, outcome: Outcome, method: Function) -> bool:
        """Nor do those who call it, by names of the pool's ends."""
        ends = self.recogniser.ending_names(outcome.acquisition.protocol)

        def gives_back(function: Function) -> bool:
            return gives_back_by_name(function) or any(last_name(call) in ends for call in function.calls)

        return for_good(self.project, method, gives_back)

    def _rest_dropped(
        self, outcome: Outcome, family: list[Function], method: Function, path: Path
    ) -> list[Leak]:
        """Where the method gives back some of what is there, and this one is not among them."""
        whole = self.whole.get(path, path)
        found: Iterable[ast.AST] = ()
        if path[2:] == (ANY_ITEM,) and whole[-1][1:-1].isdigit():
            answers = {each: self._asked_of(outcome, each, whole) for each in family if each.owner}
            ended = any(answer.fate is not Fate.BORROW or answer.result for answer in answers.values())
            elsewhere = any(place[:2] != path[:2] for place in outcome.beside)  # in a queue, too
            names = self.recogniser.ending_names(outcome.acquisition.protocol)
            elsewhere = elsewhere or comes_back_by_word(outcome, family, names)
            apart = (*taken_apart(method, path[1][1:]), *gone_over_apart(method, path[1][1:]))
            found = () if ended or elsewhere else apart
            if ended and not (outcome.acquisition.foreign or outcome.unknown):
                part = int(whole[-1][1:-1])
                found = swept_in_part(method, path[1][1:], part, names, outcome.function)
                if answers[method].fate is Fate.RELEASE:
                    found = (*found, *self._others_of_a_list(outcome, method, whole))
        elif path[2:] == (ANY_ITEM,):
            found = rest_dropped(method, path[1][1:], outcome.function)
            if self._are_lists(outcome, whole):
                looks_on = partial(self._looks_on, outcome, method)
                found = (*found, *popped_in_part(method, path[1][1:], looks_on))
            if len(whole) == 5 and whole[3].startswith(".") and whole[4] == ANY_ITEM:
                found = (*found, *popped_in_part(method, path[1][1:], field=whole[3][1:]))
            if whole[2:] == (ANY_ITEM, ANY_ITEM) or any(goes_through(each, path[1][1:]) for each in family):
                found = (*found, *starred_away(method, path[1][1:]))
        elif len(path) == 2:
            found = self._half_emptied(outcome, family, method, path)
        if len(whole) == 4 and whole[2] == ANY_ITEM and whole[3].startswith("."):
            found = (*found, *self._forgotten(outcome, family, method, whole))
        if path[2:3] == (ANY_ITEM,) and not (outcome.acquisition.foreign or outcome.unknown):
            ends = self.recogniser.ending_names(outcome.acquisition.protocol)
            found = (*found, *passed_over_and_cleared(method, path[1][1:], ends, outcome.function))
        over_zero = self._over_zero(outcome, method, path)
        passing = [over_zero] if over_zero is not None else []
        return [replace(self._dropped_at(method, at), parted=True) for at in (*passing, *found)]

    def _seen_to_in_part(self, outcome: Outcome, method: Function, path: Path) -> list[Leak]:
        """Of what the tree's own pool lent, and what lies nowhere else; of tables the lists in them."""
        whole, attribute = self.whole.get(path, path), path[1][1:]
        known = outcome.acquisition.foreign or outcome.acquisition.keyed or outcome.unknown
        if known or {place[:2] for place in outcome.beside} - {path[:2]} or method is outcome.function:
            return []
        rows = self._are_lists(outcome, whole)
        if not rows and (method.cls is None or attribute in method.cls.tables):
            return []
        ends = Ends(self.recogniser.ending_names(outcome.acquisition.protocol), frozenset())
        if not for_good(self.project, method, ends.are_called_by):
            return []
        looks_on = partial(self._looks_on, outcome, method)
        found = seen_to_in_part(method, attribute, ends.its, looks_on, rows=rows)
        return [replace(self._dropped_at(method, at), parted=True) for at in found]

    def _others_of_a_list(self, outcome: Outcome, method: Function, whole: Path) -> Iterable[ast.AST]:
        """`self.hops.clear()` behind `revoke(self.hops[0][1])`, of pairs; so of lists of pairs in a table."""
        if len(whole) == 4:
            return rest_dropped(method, whole[1][1:], outcome.function)
        return popped_in_part(method, whole[1][1:]) if self._are_lists(outcome, whole) else ()

    def _forgotten(
        self, outcome: Outcome, family: list[Function], method: Function, whole: Path
    ) -> Iterable[ast.AST]:
        """Of what the tree's own pool lent, and what lies nowhere else than in an entry's field."""
        known = outcome.acquisition.foreign or outcome.acquisition.keyed or outcome.unknown
        alone = outcome.returned is None and len(outcome.beside) == 1
        if known or not alone:
            return ()
        return self._forgotten_in(outcome, family, method, whole[1][1:], whole[3][1:])

    def _forgotten_in(
        self, outcome: Outcome, family: list[Function], method: Function, table: str, field: str
    ) -> Iterable[ast.AST]:
        of_any = frozenset(each.name for each in self.recogniser.releasing)
        ends = Ends(self.recogniser.ending_names(outcome.acquisition.protocol), of_any)
        if not for_good(self.project, method, ends.are_called_by):
            return ()
        return forgotten_by(method, family, table, field, ends)

    def _forgotten_keys(self, outcome: Outcome) -> Iterator[StoredField]:
        """Of what is given back by the key that an entry notes."""
        cls = outcome.function.cls
        for table, field in tables_noting(outcome, self.model) if cls is not None else ():
            family = list(self.family_of(cls)) if cls is not None else []
            found = [
                self._dropped_at(method, at)
                for method in family
                for at in self._forgotten_in(outcome, family, method, table, field)
            ]
            if found and cls is not None:
                place = Field(cls.qualname, f"{table}[*]")
                drops = tuple(replace(each, parted=True) for each in found)
                yield StoredField(place, outcome.lease.span, drops=drops)

    def _rest_passed_over(self, outcome: Outcome, method: Function, path: Path) -> list[Leak]:
        """`spare = self.spare.pop(key)`, `self.tables[key].extend(spare[:n])`: nobody has those behind."""
        lists = self._are_lists(outcome, self.whole.get(path, path)) and not outcome.acquisition.foreign
        if method is outcome.function or not lists:
            return []
        found = [at for at in popped_in_part(method, path[1][1:]) if keeps_the_part(method, at)]
        return [replace(self._dropped_at(method, at), parted=True) for at in found]

    def _are_lists(self, outcome: Outcome, whole: Path) -> bool:
        """The entries of the table: made of several leases, or what the pool hands out at once."""
        if whole[2:4] == (ANY_ITEM, ANY_ITEM) and lists_them(outcome.function):
            return True
        lenders = self.recogniser.calls.targets(outcome.function, outcome.call)[0]
        return whole[2:3] == (ANY_ITEM,) and bool(lenders) and all(map(hands_out_things_in_a_list, lenders))

    def _looks_on(self, outcome: Outcome, method: Function, call: ast.Call) -> bool:
        """Whether it leaves what it is told to whoever has it, by all who may be called."""
        acquisition = outcome.acquisition
        answers = [
            self.summaries.answer(Question(target, (name,), acquisition.value, acquisition.protocol))
            for target in self.recogniser.calls.targets(method, call)[0]
            for at in range(len(call.args))
            if (name := parameter_for(target, at, is_bound(target, call))) is not None
        ]
        untouched = (each.fate is Fate.BORROW and each.result is None and not each.stored for each in answers)
        return bool(answers) and all(untouched)

    def _half_emptied(
        self, outcome: Outcome, family: list[Function], method: Function, path: Path
    ) -> Iterable[ast.AST]:
        """Of what the tree's own pools lent, where nobody but the field has it."""
        acquisition, function = outcome.acquisition, outcome.function
        others = {place[:2] for place in outcome.beside} - {path}
        known = self.whole.get(path, path) == path and not (acquisition.foreign or acquisition.keyed)
        if others or not known or method is function or method.name in INITIAL:
            return ()
        own = method.parameters[0]
        flags = ((key, says) for key, says in outcome.under if key[1:].isidentifier())
        under = frozenset((f"{own}{key}", says) for key, says in set_at_birth(flags, family))
        followed = self._followed(method, (own, *path[1:]), acquisition, under)
        if followed is None:
            return ()
        known_flags = frozenset(key[len(own) + 1 :] for key, _ in under)
        end = HalfEnd(method, followed, path[1][1:], known_flags)
        return half_emptied(end, function, outcome.call, family)

    def _ended_for_the_next(
        self, outcome: Outcome, family: list[Function], path: Path, released_by: list[str]
    ) -> bool:
        """Only where another one is put there: of what the tree's own pools lent, where nobody but the field
        has it."""
        acquisition, function = outcome.acquisition, outcome.function
        others = {place[:2] for place in outcome.beside} - {path}
        told = acquisition.foreign or acquisition.keyed or others or outcome.unknown
        if len(path) != 2 or told or function.name in INITIAL:
            return False
        return only_for_the_next(released_by, family, function, outcome.call, path)

    def _closed_without(self, outcome: Outcome, family: list[Function], path: Path) -> list[str]:
        """The end of the object that forgets the last lease."""
        names = self.recogniser.ending_names_of_class(outcome.acquisition.protocol)
        closing = closes_without(family, outcome.function, outcome.call, path[1][1:], names)
        return [closing.qualname] if closing is not None else []

    def _dropped_at(self, method: Function, at: ast.AST) -> Leak:
        return Leak(Loss.DROPPED, span_of(method.module.path, at, method.module.lines), "", ())
