"""Fields of records that a method empties over a lease, which it sees to on another way, or another method
where the record comes out of its table.

seq = self.active[name]
if seq.tail is not None and accepted:
    seq.blocks.append(seq.tail)
seq.tail = None                      # and where it was not accepted?

victim = self.running.pop()
victim.blocks = []                   # `finish` gives them back
self.waiting.appendleft(victim)
"""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Acquisition, Handle
from auditor.flow.follow import EDGES, Followed, follow_from
from auditor.flow.held import Held
from auditor.flow.knowledge import NOTHING
from auditor.flow.lease import Loss, StoredField
from auditor.flow.limits import TooManyStates
from auditor.flow.trace import shortest_path
from auditor.ir.graph import TooLarge
from auditor.ir.ops import ANY_ITEM, Assume, Constant, Make, Move, Next, Path, Store
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.back_in_line import BackInLine
from auditor.project.fields.forgetting import HANDING_ON, INITIAL
from auditor.project.fields.record_places import TAKING, RecordPlace
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


class SetToNone(BackInLine):
    """Asks each method of the class that finds such a record in one of its tables."""

    def _set_to_none(self, outcome: Outcome) -> Iterator[StoredField]:
        place, cls = self._record_place(outcome), outcome.function.cls
        if place is None or cls is None or outcome.acquisition.foreign:
            return
        if place.field[1:] not in ((), (ANY_ITEM,)):
            return
        for method in self.family_of(cls):
            named = not HANDING_ON.isdisjoint(split(method.name))
            if method is outcome.function or method.name in INITIAL or named:
                continue
            if not _empties(method, place.field[0][1:]):
                continue
            if any(self._is_lost_in(outcome, place, method, name) for name in _records(method, place)):
                yield StoredField(
                    place.as_field(cls.qualname), outcome.lease.span, partly_by=(method.qualname,)
                )
                return

    def _is_lost_in(self, outcome: Outcome, place: RecordPlace, method: Function, name: str) -> bool:
        at: Path = (name, *place.field)
        followed = self._from_where_it_is_named(outcome.acquisition, method, name, at)
        if followed is None or followed.endings.unknown or followed.endings.taken:
            return False
        endings = followed.endings
        moved = {stored for stored in endings.stored.values() if stored[:2] != at[:2]}
        seen_to = len(at) == 2 and bool(endings.released or moved)  # of a list some may be
        if not (seen_to or self._is_anothers_to_end(outcome, place, method, name)):
            return False
        return any(
            loss is Loss.OVERWRITTEN
            and _is_none(method, node)
            and not _tells(method, followed, node, held, at)
            for loss, node, held in endings.lost
        )

    def _is_anothers_to_end(self, outcome: Outcome, place: RecordPlace, method: Function, name: str) -> bool:
        """The record leaves its table here, and another method gives back what lies in that field."""
        field, cls = place.field[0][1:], outcome.function.cls
        taken = any(
            isinstance(value, ast.Call) and last_name(value) in TAKING for value in given_to(method, name)
        )
        if not taken or cls is None or any(map(looks_releasing, method.calls)):
            return False
        return any(
            any(True for _ in self._known_releases(outcome, other)) and _reads(other, field)
            for other in self.family_of(cls)
            if other is not method
        ) and not _reads(method, field)

    def _from_where_it_is_named(
        self, acquisition: Acquisition, method: Function, name: str, at: Path
    ) -> Followed | None:
        graph = method.graph
        given = Acquisition(
            acquisition.protocol, Handle.RESULT, acquisition.value, (at,), "", telling=acquisition.telling
        )
        ops = enumerate(graph.ops)
        bound = [node for node, op in ops if isinstance(op, Move | Next) and op.target == (name,)]
        if len(bound) != 1:
            return None
        start = [to for to, edge in graph.successors[bound[0]] if edge in EDGES["none"]]
        try:
            return follow_from(graph, self.effects_of(method), given, -1, NOTHING, start, EDGES["none"])
        except (TooLarge, TooManyStates, RecursionError):
            return None


def _empties(method: Function, field: str) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and _is_empty(node.value)
        and any(isinstance(each, ast.Attribute) and each.attr == field for each in node.targets)
        for node in method.statements
    )


def _is_empty(value: ast.expr) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
    return isinstance(value, ast.Constant) and value.value is None


def _reads(method: Function, field: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.ctx, ast.Load)
        for node in method.nodes
    )


def _records(method: Function, place: RecordPlace) -> Iterator[str]:
    """`seq` of `seq = self.active[name]`, of `for seq in self.active.values():`."""
    for node in method.statements:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.For(target=ast.Name(id=name), iter=value)
            ):
                parts = (part for part in walk(value) if isinstance(part, ast.expr))
                if any(own_attribute(part, method.owner or "") in place.tables for part in parts):
                    yield name


def _is_none(method: Function, node: int) -> bool:
    """The store puts None there, or an empty list, and no other lease."""
    op = method.graph.ops[node]
    if not isinstance(op, Store):
        return False
    given = (
        each for each in method.graph.ops if isinstance(each, Constant | Make) and each.target == op.source
    )
    return any(not each.items if isinstance(each, Make) else each.value is None for each in given)


def _tells(method: Function, followed: Followed, node: int, held: Held, at: Path) -> bool:
    """`if seq.owned: drop(seq.tail)`: another field of the record says whose it is."""
    ops = method.graph.ops
    path = shortest_path(method.graph, followed.solution, node, held)
    asked = (op for station in path if isinstance(op := ops[station.node], Assume))
    return any(
        op.subject is not None and op.subject[:1] == at[:1] and op.subject[:2] != at[:2] for op in asked
    )
