"""Which leases are put over another one that nothing has touched, in fields and tables that others know."""

import ast
import re
from collections.abc import Iterator, Sequence, Set
from functools import partial

from auditor.flow.effects import Handle, Value
from auditor.flow.lease import StoredField
from auditor.ir.ops import ANY_ITEM, RESULT
from auditor.project.code.modules import Function
from auditor.project.fields.born_full import born_full
from auditor.project.fields.copied_on_write import put_in_its_place
from auditor.project.fields.elsewhere import released_attributes
from auditor.project.fields.ended_where_flagged import may_have_ended
from auditor.project.fields.filled_together import works_with_what_came_along
from auditor.project.fields.filling_again import Filling, fillings, may_be_called_again
from auditor.project.fields.forgetting import CLOSING, INITIAL
from auditor.project.fields.full_places import is_in_a_list, is_refused_elsewhere
from auditor.project.fields.given_objects import changes_places, others_look_into_it
from auditor.project.fields.items_again import (
    filled_in_each_round,
    filled_where_others_pass_over,
    in_items,
    tries_until_it_is,
)
from auditor.project.fields.looked_up import (
    empty_a_record,
    fields_inside,
    leave_no_shells,
    records_looked_up,
)
from auditor.project.fields.names_of_refillers import (
    COMING_BACK,
    OPENED_AGAIN,
    follows_another,
    is_answered,
    keeps_the_latest,
)
from auditor.project.fields.outgrown import noted
from auditor.project.fields.put_over import Way, lent_into
from auditor.project.fields.reckoning import (
    SETTING,
    comes_in_pairs,
    others_look_first,
    speaking_for,
    told_by_its_caller,
)
from auditor.project.fields.refilling import Refilling, filled
from auditor.project.fields.replacing import works_first
from auditor.project.fields.seeing_to_it import sees_to_it
from auditor.project.fields.siblings_look_first import siblings_look_first
from auditor.project.fields.stepping_on import is_of_its_own_tables, others_give_it_back, told_the_former
from auditor.project.fields.what_stays import carries_on, goes_elsewhere, in_its_tables
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome, has_gone_to_the_caller


class OverAnother(Refilling):
    """Asks of the function that stores the lease whether there is one already."""

    def _over_another(self, outcome: Outcome) -> Iterator[StoredField]:
        function, acquisition = outcome.function, outcome.acquisition
        if function.name in INITIAL or function.is_context_manager:
            return
        if acquisition.value is Value.AMOUNT and not function.name.startswith("set_"):
            return
        kept = acquisition.handle is Handle.ARGUMENT or outcome.stored or outcome.beside
        if outcome.lease.releases and not kept:
            return  # `self.shown[name] = buffer.clone()`
        family = self._those_around(function)
        borrowed = partial(self._borrowed, acquisition)
        ends = self._ends(outcome)
        callers_end = partial(self._callers_end, function, ends)
        for filling in put_in_its_place(function, outcome.call, ends, callers_end):
            enders = list(self._ends_of(outcome, filling))
            if not self._seen_to(filling, enders):
                yield filled(filling, enders)
        for filling in lent_into(function, outcome.call, _marked(outcome)):
            tensors = acquisition.value is Value.TENSOR
            way = Way(filling, outcome.call, family, self._ends(outcome), borrowed, tensors)
            if _lies_elsewhere(outcome, filling):
                continue
            if told := told_the_former(filling, outcome.call):
                yield from self._stepped_on(outcome, way, told)
                continue
            if not way.is_known_to_all():
                if in_items(filling) and not way.is_free() and way.is_untouched():
                    yield from self._in_items(outcome, filling, family)
                continue
            inside = fields_inside(outcome, (filling.owner, f".{filling.field}"))
            seen = records_looked_up(filling, inside, self._ends(outcome)) if inside else frozenset()
            there = self._is_there(way, outcome) or (not inside and way.names_the_former())
            looked_up = seen and not there and not COMING_BACK.match(function.name)
            if not (there or looked_up) or way.is_free():
                continue
            if not way.is_untouched(seen) and not (way.is_still_going() and self._stays(outcome, filling)):
                continue
            enders = list(self._ends_of(outcome, filling))
            if self._may_have_ended(outcome, way, enders):
                continue
            if looked_up and (empty_a_record(enders, inside) or not leave_no_shells(enders, filling.field)):
                continue
            ended = way.asks_what_ends(enders) or _follows_its_end(way, enders)
            ended = ended or changes_places(filling, family) or way.former_is_told_to_end(enders)
            working = filling.owner != function.owner and works_first(filling)  # so its callers ended nothing
            if enders and not ended and (working or not self._seen_to(filling, enders)):
                yield filled(filling, enders)

    def _callers_end(self, function: Function, ends: Set[str]) -> bool:
        """`old, fresh = self.own_copy(key)`, and `pool.drop(old)` behind it."""
        return any(
            each is not function
            and f"{function.name}(" in each.text
            and any(last_name(call) == function.name for call in each.calls)
            and any(last_name(call) in ends for call in each.calls)
            for module in self.project.parsed()
            for each in list(module.by_node.values())
        )

    def _may_have_ended(self, outcome: Outcome, way: Way, enders: Sequence[Function]) -> bool:
        """What is passed over for what is asked of it, `if row is not None and row.fit: return row`."""
        source, its = self.recogniser.source, {each.name for each in way.family}

        def is_lent(function: Function, call: ast.Call) -> bool:
            return last_name(call) not in its and source(function, call) is not None

        asked, ends = way.asked_where_kept(), self._ends(outcome)
        if any(node.attr in ender.text for node in asked for ender in enders):
            return True
        return bool(asked) and may_have_ended(asked, way.method, self.project, ends, is_lent)

    def _stays(self, outcome: Outcome, filling: Filling) -> bool:
        """Followed from the method's entry, what lies in the record that goes is there up to the store, and
        nobody gives it back: `for page in job.draft.pages: free(page)` says nothing of its slot."""
        method, place = filling.method, (filling.owner, f".{filling.field}")
        paths = {*(path for _, path in outcome.stored), *outcome.beside}
        inside = {path[2:] for path in paths if path[:2] == place}
        if len(inside) != 1 or inside == {()} or filling.key is not None or carries_on(filling):
            return False
        whole = (*place, *next(iter(inside)))
        if empty_a_record(self._those_around(method), {piece[1:] for piece in whole[2:]}):
            return False
        starts = in_its_tables(method, whole)
        followed = self.followed_all(method, starts, outcome.acquisition)
        if followed is None or goes_elsewhere(method, followed, {start[:2] for start in starts}):
            return False
        ends, states = followed.endings, followed.solution.states
        stores = [node for node, op in enumerate(method.graph.ops) if op.at is filling.target]
        there = any(whole in held.places for node in stores for held in states.get(node, ()))
        return there and not ends.is_somebodys

    def _in_items(
        self, outcome: Outcome, filling: Filling, family: Sequence[Function]
    ) -> Iterator[StoredField]:
        enders = list(self._ends_of(outcome, filling))
        outgrown = noted(filling.method, filling.field, filling.owner)
        again = outgrown or filled_where_others_pass_over(filling, outcome.call, family, enders)
        if enders and again and not self._seen_to(filling, enders):
            yield filled(filling, enders)

    def _stepped_on(self, outcome: Outcome, way: Way, told: frozenset[int]) -> Iterator[StoredField]:
        filling = way.filling
        known = way.is_known_to_all() or is_of_its_own_tables(filling, way.method.owner or "")
        ends = self._ends(outcome)
        if not known or not others_give_it_back(filling, outcome.call, way.family, ends):
            return
        if not way.is_free() and way.is_untouched(told):
            enders = list(self._ends_of(outcome, filling))
            if enders and not self._seen_to(filling, enders):
                yield filled(filling, enders)

    def _those_around(self, function: Function) -> list[Function]:
        if function.cls is not None:
            return list(self.family_of(function.cls))
        return list(function.module.functions.values())

    def _is_there(self, way: Way, outcome: Outcome) -> bool:
        """By what the method asks, by its name, or because another that fills the table under the key that
        it is told looks first."""
        filling = way.filling
        keyed = filling.key is not None
        if (
            filled_in_each_round(filling)
            or way.asks()
            or keeps_the_latest(filling.field)
            or (follows_another(way.method.name, keyed) and (keyed or not tries_until_it_is(filling)))
        ):
            return True
        if is_in_a_list(filling, self.project):
            return True
        if COMING_BACK.match(way.method.name):
            return False
        if self._only_fills(filling, list(way.family)):
            return True
        if filling.owner != way.method.owner:
            if way.method.name == f"set_{filling.field}" and not keyed:
                return True  # `set_draft(request, rows)` may be called whenever another one is wanted
            if works_first(filling) or works_with_what_came_along(filling, way.family):
                return True
            if born_full(filling, outcome.call, way.family, self.model):
                return True
            if is_refused_elsewhere(filling, outcome.call, self.project):
                return True
            if siblings_look_first(filling, outcome.call, way.family):
                return True
            known = others_look_into_it(filling, outcome.call, way.family)
            return known and not comes_in_pairs(way.method.name)
        if filling.key is None:
            return self._is_filled_again(way, outcome)
        if not told_by_its_caller(filling):
            return False
        pairs = comes_in_pairs(way.method.name)
        again = not has_gone_to_the_caller(outcome) and self._comes_again(filling, way.family)
        alike = speaking_for(filling, way.family, self.model)
        return again or (not pairs and others_look_first(filling, way.call, alike))

    def _is_filled_again(self, way: Way, outcome: Outcome) -> bool:
        """`self.anchor = node.pin()`, where another method looks before it fills its field; of what is stored
        as it came from the pool `_filled_again` has judged."""
        if outcome.stored or comes_in_pairs(way.method.name) or not may_be_called_again(way.method):
            return False
        place = (way.filling.owner, f".{way.filling.field}")
        alike = speaking_for(way.filling, way.family, self.model)
        marked = outcome.acquisition.handle is Handle.ARGUMENT  # `set_hot(names)`, each of which is pinned
        again = marked and SETTING.match(way.method.name) is not None
        again = again or others_look_first(way.filling, outcome.call, alike)
        return again and not self._handed_on(outcome, list(way.family), place)

    def _ends_of(self, outcome: Outcome, filling: Filling) -> Iterator[Function]:
        """Functions that give back what is in a field so named, or in a record that is put there."""
        fields = {filling.field} | {
            path[-1][1:]
            for path in (*(path for _, path in outcome.stored), *outcome.beside)
            if path[:2] == (filling.owner, f".{filling.field}") and path[-1].startswith(".")
        }
        for module in self.project.parsed():
            for function in list(module.by_node.values()):
                if any(each in function.text and self._ends_it(outcome, function, each) for each in fields):
                    yield function

    def _ends_it(self, outcome: Outcome, function: Function, field: str) -> bool:
        """`getattr(self, name)` of a name that it lists included."""
        known = {*self._releases(outcome, function)}
        known.update(call for call in function.calls if self._hands_to_an_end(outcome, function, call))
        if field in released_attributes(function, of_others=False, known=known):
            return True
        return bool(known) and any(isinstance(n, ast.Constant) and n.value == field for n in function.nodes)

    def _seen_to(self, filling: Filling, enders: Sequence[Function]) -> bool:
        """Some caller ends what is there, hands it on, or has made sure that there is none. Of files that
        nobody has read their text says so."""
        name = filling.method.name
        ending = {ender.name for ender in enders} - {name}
        if any(is_answered(name, each) for each in ending):
            return True
        speaks = re.compile(
            rf"\.{filling.field}\b|\.(?:{'|'.join(sorted(ending | {filling.field}))})\("
        ).search
        read = {module.path: module for module in self.project.parsed()}
        for path, text in self.project.mentioning(f"{name}("):
            if path not in read and speaks(text):
                return True
            for caller in list(read[path].by_node.values()) if path in read else ():
                if caller is not filling.method and sees_to_it(caller, filling, ending):
                    return True
        return False


def _lies_elsewhere(outcome: Outcome, filling: Filling) -> bool:
    """`self.every.append(arena)` beside it: what is put over is in the list all the same. Not
    `self.sessions[s.sid] = s` beside `s.pages = ...`, which leads to the same field, or to a list there."""
    its = (f".{filling.field}",) if filling.key is None else (f".{filling.field}", ANY_ITEM)
    places = {*(path for _, path in outcome.stored), *outcome.beside}
    return any(
        path[:2] != (filling.owner, its[0])
        and path[-len(its) :] != its
        and path[-len(its) - 1 :] != (*its, ANY_ITEM)
        and path[:1] != RESULT
        for path in places
    )


def _follows_its_end(way: Way, enders: Sequence[Function]) -> bool:
    """`reopen()` of what `__init__` opens and `close()` ends: it is called in between."""
    filling = way.filling
    if way.asks() or filling.key is not None or OPENED_AGAIN.match(way.method.name) is None:
        return False
    its = [ender for ender in enders if ender in way.family]
    if filling.owner != way.method.owner or not all(CLOSING.fullmatch(ender.name) for ender in its):
        return False
    others = (each for each in way.family if each is not way.method and each.name not in INITIAL)
    return not any(fillings(each, each.owner or "", filling.field) for each in others)


def _marked(outcome: Outcome) -> list[str]:
    """`lease` of `pool.pin(lease)`, or of `lease.pin()`."""
    match outcome.acquisition.handle, outcome.call:
        case Handle.ARGUMENT, ast.Call(args=args):
            return [each.id for each in args if isinstance(each, ast.Name)]
        case Handle.RECEIVER, ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return [name]
    return []
