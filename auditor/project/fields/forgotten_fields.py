"""Fields of objects that a method is given or finds in a table, which whoever ends such an object forgets."""

import ast
from collections.abc import Iterator, Set
from functools import partial

from auditor.flow.effects import BORROWED, Acquisition, Treatment
from auditor.flow.indirect import AT
from auditor.flow.lease import Field, StoredField
from auditor.ir.ops import Call, Path
from auditor.project.code.bindings import own_attribute, told_by_position
from auditor.project.code.gradients import is_autograd_function
from auditor.project.code.modules import Function
from auditor.project.fields.backward_exits import keeps_by_what_is_wanted
from auditor.project.fields.flags_of_objects import passed_over
from auditor.project.fields.further_on import FurtherOn
from auditor.project.fields.in_others import (
    given_field,
    is_forgotten,
    is_made_by_its_own,
    is_returned,
    only_work,
    only_worked_with,
)
from auditor.project.fields.one_end_forgets import Ends
from auditor.project.fields.only_refilled import ends_for_good, fills_always, reads_before, reads_of
from auditor.project.fields.siblings import ends_its_siblings
from auditor.project.meaning.outside_words import of_numbers
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome

_LOOKED_UP = Treatment(result=(AT,), maybe=True)
"""`self.refs[page]`, which may as well be its memory."""


class ForgottenFields(FurtherOn):
    """Asks who ends what lies in a field of another object than the method's own."""

    def _of_given_objects(self, outcome: Outcome) -> Iterator[StoredField]:
        """`request.row = self.rows.assign()`, and nobody does anything but work with `.row`."""
        acquisition, function = outcome.acquisition, outcome.function
        yield from self._kept_on_ctx(outcome)
        place = given_field(function, (*(path for _, path in outcome.stored), *outcome.beside))
        told = acquisition.foreign or acquisition.keyed or acquisition.inner or outcome.unknown
        if place is None or told or acquisition.places[1:] or function.is_context_manager:
            return
        cls, name = function.cls, place[1][1:]
        ends = self.recogniser.ending_names_of_class(acquisition.protocol)
        if cls is not None and is_autograd_function(self.model, function):
            others = (method for method in self.family_of(cls) if method is not function)
            lost = only_work(others, name, ends=ends)  # nobody else is given the `ctx`
        else:
            borrowed = partial(self._borrowed, outcome.acquisition)
            forgotten = self._is_forgotten(outcome, place)
            aside = partial(self._aside, outcome, place) if forgotten else None
            lost = forgotten and only_worked_with(
                self.project, name, borrowed=borrowed, ends=ends, aside=aside
            )
        partly = None if lost else self._forgotten_by_one(outcome, place)
        if lost or partly is not None:
            owner = cls.qualname if cls is not None else function.qualname
            partly_by = (partly.qualname,) if partly is not None else ()
            yield StoredField(Field(owner, name, place[0]), outcome.lease.span, partly_by=partly_by)

    def _forgotten_by_one(self, outcome: Outcome, place: Path) -> Function | None:
        """The end of such objects that gives back all but this."""
        function, field = outcome.function, place[1][1:]
        has_it = outcome.returned is not None or is_made_by_its_own(function, place[0])
        if function.cls is None or has_it or is_returned(function, place[0]):
            return None
        ends = Ends(self.project, self._around(function), field, partial(self._known_releases, outcome))
        return ends.forgetful(list(self._ending(outcome, field)))

    def _borrowed(self, acquisition: Acquisition, function: Function, call: ast.Call, given: ast.AST) -> bool:
        """`self._fill(request.draft, tokens)`, where the body of `_fill` tells; of torch's own functions none
        keeps what it is told."""
        targets, constructed, dotted = self.recogniser.calls.targets(function, call)
        if constructed is None and not targets and of_numbers(dotted):
            return True
        if constructed is not None or not targets:
            return False
        if last_name(call) in self.recogniser.ending_names_of_class(acquisition.protocol):
            return False  # `unpin(block)`, of one that `mint()` lent
        ops = [op for op in function.graph.ops if isinstance(op, Call) and op.at is call]
        told = [position for position, value in told_by_position(call) if value is given]
        treated = [
            self.effects_of(function).treatment(op, position, (), acquisition.value, acquisition.protocol)
            for op in ops
            for position in told
        ]
        compared = any(_is_compared(call, node) for node in function.nodes)
        return bool(treated) and all(
            each == BORROWED or (compared and each == _LOOKED_UP) for each in treated
        )

    def _kept_on_ctx(self, outcome: Outcome) -> Iterator[StoredField]:
        """`ctx.normed = normed`, and a backward that returns early where no gradient of x is wanted."""
        function, cls = outcome.function, outcome.function.cls
        if cls is None or not is_autograd_function(self.model, function) or outcome.unknown:
            return
        places = {path for _, path in outcome.stored}
        backward = self.model.method(cls, "backward")
        if len(places) != 1 or backward is None or backward is function or not backward.parameters:
            return
        (place,) = places
        followed = self._followed(backward, (backward.parameters[0], *place[1:]), outcome.acquisition)
        if place[0] != function.parameters[0] or followed is None:
            return
        if keeps_by_what_is_wanted(backward, function, followed):
            field = Field(cls.qualname, place[1][1:], place[0])
            yield StoredField(field, outcome.lease.span, partly_by=(backward.qualname,))

    def _is_forgotten(self, outcome: Outcome, place: Path) -> bool:
        """Somebody of the tree has such objects, so that nobody outside sees to them."""
        function = outcome.function
        made = is_made_by_its_own(function, place[0])
        if outcome.returned is not None or (is_returned(function, place[0]) and not made):
            return False
        family = self._around(function)
        siblings = any(True for _ in self._sibling_enders(outcome, place))
        return siblings or (not made and is_forgotten(family, place, function))

    def _around(self, function: Function) -> list[Function]:
        cls = function.cls
        return list(self.family_of(cls) if cls is not None else function.module.functions.values())

    def _sibling_enders(self, outcome: Outcome, place: Path) -> Iterator[Function]:
        names = self.recogniser.ending_names_of_class(outcome.acquisition.protocol)

        def gives_back(function: Function, call: ast.Call) -> bool:
            targets = self.recogniser.calls.targets(function, call)[0]
            return last_name(call) in names or any(each in self.recogniser.releasing for each in targets)

        return ends_its_siblings(self.project, place, self._around(outcome.function), gives_back)

    def _aside(self, outcome: Outcome, place: Path, function: Function) -> Set[int]:
        """`self.scratch.lend()` names the pool that lends `request.scratch`; what gives back the last one to
        put another there leaves that one; and an end by a flag that was not raised does not come about."""
        filling = outcome.function
        found = {*passed_over(self.project, function, filling, place[1][1:])}
        if function is filling and fills_always(filling, outcome.call, place):
            enders = list(self._sibling_enders(outcome, place))
            if ends_for_good(enders, self._around(filling)):
                found |= reads_before(filling, place, outcome.call)
        if function.cls is not None and filling.cls is not None and function in self.family_of(filling.cls):
            pool = getattr(outcome.call.func, "value", None)
            field = own_attribute(pool, filling.owner or "") if isinstance(pool, ast.expr) else None
            if field == place[1][1:]:
                found |= reads_of(function, function.owner or "", field)
        return found


def _is_compared(call: ast.Call, node: ast.AST) -> bool:
    """`pool.refs(page) == 1`: what is looked up there goes nowhere, and does not tell that it has ended."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return False
    return any(each is call for each in (node.left, *node.comparators))
