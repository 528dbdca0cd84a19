"""Methods that put None over what an object holds, where others give it back first: `request.slot = None` in
`preempt(request)`, and `self.slots.release(request.slot)` before it in `finish(request)`."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.effects import Value
from auditor.flow.lease import StoredField
from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import Filling, is_none
from auditor.project.fields.forgetting import INITIAL, PARTING
from auditor.project.fields.over_another import OverAnother
from auditor.project.fields.put_over import Way
from auditor.project.fields.refilling import filled
from auditor.project.outcome import Outcome, has_gone_to_the_caller
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


class NothingOver(OverAnother):
    """Asks who empties the fields of given objects that a lease was put into."""

    def _nothing_over_it(self, outcome: Outcome) -> Iterator[StoredField]:
        paths = {path for _, path in outcome.stored} | set(outcome.beside)
        function = outcome.function
        given = set(function.parameters) - {function.owner}
        of_given = [path for path in paths if len(path) == 2 and path[0] in given]
        if len(of_given) != 1 or outcome.acquisition.value is Value.AMOUNT:
            return
        (path,) = of_given
        if has_gone_to_the_caller(outcome) or any(other[-1] != path[1] for other in paths):
            return
        field = path[1][1:]
        family = self._those_around(function)
        emptied = [each for method in family if method is not function for each in _emptied(method, field)]
        enders = list(self._ending(outcome, field)) if emptied else []
        for filling in emptied:
            if filling.method not in enders and self._only_emptied(outcome, filling, family, enders):
                yield filled(filling, enders)
                return

    def _only_emptied(
        self, outcome: Outcome, filling: Filling, family: Sequence[Function], enders: Sequence[Function]
    ) -> bool:
        way = Way(filling, outcome.call, family)
        known = way.is_known_to_all() or self._is_one_of_those_it_ends(outcome, filling)
        untouched = known and not way.is_free() and way.is_untouched()
        return untouched and bool(enders) and not self._seen_to(filling, enders)

    def _is_one_of_those_it_ends(self, outcome: Outcome, filling: Filling) -> bool:
        """`for bucket in self.buckets: self.arena.release(bucket.span)`, and always `bucket.shard = None`."""
        method, owner = filling.method, filling.owner
        stores = [
            node
            for node in method.nodes
            if isinstance(node, ast.Name) and node.id == owner and isinstance(node.ctx, ast.Store)
        ]
        loops = [
            node
            for node in method.statements
            if isinstance(node, ast.For)
            and node.target in stores
            and filling.statement in node.body
            and _goes_over_its_own(node.iter, method.owner or "")
        ]
        return len(stores) == 1 and any(
            self._ends_another_field(outcome, method, owner, each) for each in loops
        )

    def _ends_another_field(self, outcome: Outcome, method: Function, owner: str, loop: ast.For) -> bool:
        inside, known = {id(node) for node in walk(loop)}, self._known_releases(outcome, method)
        return any(
            own_attribute(argument, owner) is not None
            for call in method.calls
            if id(call) in inside and (call in known or looks_releasing(call))
            for argument in call.args
        )


def _goes_over_its_own(over: ast.expr, own: str) -> bool:
    """`self.buckets`, `self.buckets.values()`, `list(self.buckets)`."""
    match over:
        case ast.Call(func=ast.Attribute(value=inner, attr="values"), args=[]):
            return _goes_over_its_own(inner, own)
        case ast.Call(func=ast.Name(id="list" | "tuple" | "reversed"), args=[inner]):
            return _goes_over_its_own(inner, own)
    return own_attribute(over, own) is not None


def _emptied(method: Function, field: str) -> Iterator[Filling]:
    """`request.slot = None` in a method whose name does not say that it is somebody else's from now on."""
    if method.name in INITIAL or not PARTING.isdisjoint(split(method.name)) or field not in method.text:
        return
    for node in method.statements:
        for target, value in assigned_by(node):
            match target:
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if name == field and is_none(value):
                    if owner != method.owner:
                        yield Filling(method, owner, field, node, target)
