"""Ends that forget a lease whatever they were asked, and give it back only if they were: `if verbose:
self.rows.put(self.row)`, and then `self.row = None`."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.flow.lease import Loss
from auditor.flow.trace import Station, shortest_path
from auditor.ir.ops import RAISING, Assume
from auditor.ir.scope import parameters_of
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.begun_either_way import may_be_begun_with
from auditor.project.fields.exits import ASKING, OWNING, asks_for, parts_of, what_decides
from auditor.project.fields.forgetting import PARTING
from auditor.protocols.vocabulary import RELEASE_WORDS, split
from auditor.source.nodes import walk

TELLING = OWNING | RELEASE_WORDS | PARTING | {
    "leave", "closed", "closing", "delete", "deleted", "released", "detached", "discard", "discarded",
    "broken", "dead", "alive", "healthy", "lost", "failed", "failure", "error", "bad", "corrupt", "invalid",
    "valid", "recycle", "reuse", "reusable", "pooled", "mine", "gone", "given", "lent", "borrow", "has",
    "ended", "acquired", "taken", "held",
}  # fmt: skip
"""Words of what is asked which say whose it is, whether it is still good, or that it has gone already."""


Answers = dict[int, Assume]
"""What a way has been answered, by the question."""


@dataclass(frozen=True)
class HalfEnd:
    """A method that may end what is in a field, followed from its entry on under what is known to hold of
    the `flags` of its object wherever there is a lease."""

    method: Function
    followed: Followed
    field: str
    flags: frozenset[str]

    @property
    def own(self) -> str:
        return self.method.owner or ""

    @cached_property
    def names(self) -> set[str]:
        """`row = self.row`."""
        given = assignments(self.method)
        return {
            target.id
            for target, value in given
            if isinstance(target, ast.Name) and own_attribute(value, self.own) == self.field
        }

    @cached_property
    def lost(self) -> list[tuple[int, Answers]]:
        """Where it is lost without any exception, though other ways give it back, and what was answered."""
        endings = self.followed.endings
        ways = [
            (node, self._way_to(node, held))
            for loss, node, held in endings.lost
            if loss is not Loss.RAISE and endings.released
        ]
        return [
            (node, self._answered(way))
            for node, way in ways
            if all(station.edge not in RAISING for station in way)
        ]

    @cached_property
    def given_back(self) -> list[Answers]:
        ends = self.followed.endings.released.items()
        return [self._answered(self._way_to(node, held)) for node, held in ends]

    def _way_to(self, node: int, held: Held) -> list[Station]:
        return shortest_path(self.method.graph, self.followed.solution, node, held)

    def _answered(self, way: Sequence[Station]) -> Answers:
        ops = (self.method.graph.ops[station.node] for station in way)
        return {id(op.at): op for op in ops if isinstance(op, Assume)}

    def tests(self) -> Iterator[ast.expr]:
        """But for what asks whether there is a lease, or for what is known."""
        asking = (node.test for node in self.method.nodes if isinstance(node, ASKING))
        decides = (
            (part for test in asking for part in parts_of(test))
            if self.names
            else what_decides(self.method, self.own, self.field)
        )
        for test in decides:
            known = self._asks_for_it(test) or own_attribute(test, self.own) in self.flags
            if not known:
                yield test

    def _asks_for_it(self, test: ast.expr) -> bool:
        if asks_for(test, self.own, self.field):
            return True
        match test:
            case ast.Compare(
                left=asked, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
            ):
                return isinstance(asked, ast.Name) and asked.id in self.names
        return isinstance(test, ast.Name) and test.id in self.names


def half_emptied(
    end: HalfEnd, storing: Function, begun: ast.Call, family: Sequence[Function]
) -> Iterator[ast.AST]:
    """Where it is forgotten, and nothing that tells this way from one that gives it back has to do with the
    lease, or with the function that stored it."""
    tests = list(end.tests()) if end.lost else []
    told = _told_with_it(end, storing, family) if tests else set()
    for node, answers in end.lost:
        for others in end.given_back:
            apart = [test for test in tests if _tells_apart(test, answers, others)]
            if apart and all(
                _is_another(test, end, told - _free(test, end, answers, storing, begun)) for test in apart
            ):
                yield end.method.graph.ops[node].at
                break


def _tells_apart(test: ast.expr, answers: Answers, others: Answers) -> bool:
    """It is asked on the one way, and not answered the same on the other."""
    asked = [id(node) for node in walk(test) if id(node) in answers]
    return any(each not in others or others[each].value != answers[each].value for each in asked)


def _free(test: ast.expr, end: HalfEnd, answers: Answers, storing: Function, begun: ast.Call) -> set[str]:
    """Fields that may say this wherever there is a lease, for so says the function that stored it."""
    return {
        name
        for node in walk(test)
        if isinstance(node, ast.expr) and (name := own_attribute(node, end.own)) is not None
        if may_be_begun_with(storing, begun, name, [answers[id(n)] for n in walk(test) if id(n) in answers])
    }


def _is_another(test: ast.expr, end: HalfEnd, told: set[str]) -> bool:
    """It reads what the method is told, and fields of its object, and nothing else."""
    nodes = [node for node in walk(test) if isinstance(node, ast.expr)]
    asked = {name for node in nodes if (name := own_attribute(node, end.own)) is not None}
    constants = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and _is_constant(node)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in constants}
    names -= {end.own}
    plain = (
        names <= set(parameters_of(end.method.node)) and not _calls(test) and not _looks_into(test, end.own)
    )
    words = {word for name in (*asked, *names) for word in split(name)}
    return plain and end.field not in asked and told.isdisjoint(asked | names) and TELLING.isdisjoint(words)


def _calls(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Call | ast.Await) for node in walk(test))


def _looks_into(test: ast.expr, own: str) -> bool:
    """`job.state`, `self.pool.closed`: what others say of themselves."""
    return any(
        isinstance(node, ast.Attribute) and own_attribute(node, own) is None and not _is_constant(node)
        for node in walk(test)
    )


def _is_constant(node: ast.Attribute) -> bool:
    """`Phase.IDLE`, of an enumeration."""
    return isinstance(node.value, ast.Name) and node.value.id[:1].isupper() and node.attr.isupper()


def _told_with_it(end: HalfEnd, storing: Function, family: Sequence[Function]) -> set[str]:
    """What the storing function asks for, and what those write who do something with the field."""
    tests = (node.test for node in storing.nodes if isinstance(node, ASKING))
    asked = {_last(node) for test in tests for node in walk(test)}
    others = [each for each in family if each is not end.method and each.name != "__init__"]
    written = {
        node.attr
        for each in others
        if any(getattr(node, "attr", "") == end.field for node in each.nodes)
        for node in each.nodes
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }
    return asked | written


def _last(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))
