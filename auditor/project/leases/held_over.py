"""Functions that begin what their callers end: `self._enter()`, which takes a lock of its object.

A hold, a mark or a state of the whole process needs no name to be ended by, so the function that left it
is as good as the call in it: `begin()` for whoever calls `end()`, `self.admit(job)` for whoever calls
`retire(job)`. Who never ends it himself leaves it to others, as with the call itself."""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from auditor.flow.effects import Acquisition
from auditor.flow.follow import EDGES, Followed
from auditor.flow.held import Held
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.flow.lease import EXCEPTIONAL, Loss
from auditor.flow.solve import solve
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Call, Edge, Leave, Next, Op, Path, Way
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.leases.refusals import doubtful_lines, refusing_lines
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.source import Source
from auditor.project.meaning.summaries import PROCESS
from auditor.project.meaning.telling import asked_of, said_at, said_by
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

CALM = EDGES["none"]
DEEPEST = 4
"""`self.doors[*]` of a caller's `self.house.doors[*]`: what lies deeper is some other object's."""


def note_held_over(recogniser: Recogniser, source: Source, outcome: Outcome) -> None:
    """What its callers begin when they call it."""
    function = outcome.function
    if not outcome.held_over or function in recogniser.acquiring or _is_called_by_python(function):
        return
    if not _is_noted_by_its_object(recogniser, outcome):
        recogniser.wrappers.setdefault(function, _told(source, outcome))


def ended_by_callers(outcome: Outcome, received: Sequence[Outcome], calls: Calls) -> Outcome:
    """`def try_begin(): profiler.start(); return True`, whose name says nothing, but whose callers end it."""
    if outcome.held_over and any(each.lease.released for each in received):
        refused = refusing_lines(outcome.function) | doubtful_lines(outcome.function, calls, outcome.call)
        left = tuple(
            leak
            for leak in outcome.lease.leaks
            if leak.loss in EXCEPTIONAL or (leak.loss is Loss.RETURN and leak.at.line in refused)
        )
        outcome.lease = replace(outcome.lease, leaks=left, handed_over=True)
    return outcome


def _is_noted_by_its_object(recogniser: Recogniser, outcome: Outcome) -> bool:
    """`self.credit = self.credits.draw(self.peer)`, and `if self.credit: self.credits.refund(self.peer)` in
    another method: the object knows, and ends it itself."""
    function, cls = outcome.function, outcome.function.cls
    noted = {
        own_attribute(target, function.owner or "")
        for target, value in assignments(function)
        if value is outcome.call
    } - {None}
    ends = recogniser.ending_names(outcome.acquisition.protocol)
    return any(
        isinstance(node, ast.If)
        and own_attribute(node.test, method.owner or "") in noted
        and any(
            isinstance(part, ast.Call) and last_name(part) in ends
            for each in node.body
            for part in walk(each)
        )
        for method in (cls.methods.values() if cls is not None and noted else ())
        for node in method.statements
    )


def _is_called_by_python(function: Function) -> bool:
    return function.is_context_manager or function.name.startswith(("__", "<"))


def _told(source: Source, outcome: Outcome) -> Source:
    root, *rest = outcome.held_over
    return Source(
        source.protocol,
        source.origin,
        source.handle,
        source.value,
        0,
        tuple(rest),
        flags=outcome.says,
        own=outcome.own,
        unless=outcome.unless,
        asked=outcome.asked,
        into="" if outcome.held_over == PROCESS else root,
        helped=True,
    )


def held_over(
    function: Function, node: int, acquisition: Acquisition, followed: Followed, known: Knowledge
) -> tuple[Path, Knowledge]:
    """Where it is still held wherever the function is left, and what the result says then; () where that is
    not so, or where its callers cannot tell whether it was taken."""
    if acquisition.managed or acquisition.inner:
        return (), NOTHING
    graph = function.graph
    place = _for_callers(graph, acquisition)
    if not place:
        return (), NOTHING
    if place != acquisition.places[0]:
        if not acquisition.declared:
            return (), NOTHING
        untouched = not followed.endings.released and not followed.endings.kept
        return (place if untouched else ()), NOTHING
    left = list(_left(graph, followed, acquisition))
    if not left:
        return (), NOTHING
    says = said_by(graph, followed.solution, left)
    without = list(_said_without_it(graph, node, known, {leave for leave, _ in left}))
    told = all(any((key, not truth) in said for key, truth in says) for said in without)
    if not acquisition.declared:  # `True` tells callers of the tree's own pools; or there is no other way
        sure = ("", True) in says or not without
        return (place if told and sure else ()), says
    return (place if told or _goes_with_its_object(function, known) else ()), says


def _for_callers(graph: Graph, acquisition: Acquisition) -> Path:
    """What the callers can name: an argument or what lies in it, and of a loop over that each."""
    place = acquisition.places[0]
    if place == PROCESS:
        return place
    loops = (op for op in graph.ops if isinstance(op, Next) and op.target == place[:1])
    elements = [op.element for op in loops]
    if len(elements) == 1 and elements[0] is not None:
        place = (*elements[0], *place[1:])
    return place if place[0] in graph.parameters and len(place) <= DEEPEST else ()


def _left(graph: Graph, followed: Followed, acquisition: Acquisition) -> Iterator[tuple[int, Held]]:
    for _, node, held in followed.endings.lost:
        if _is_left(graph.ops[node]) and acquisition.places[0] in held.places:
            yield node, held


def _said_without_it(graph: Graph, site: int, known: Knowledge, left: Set[int]) -> Iterator[Knowledge]:
    """What the result says where the function is left without having come by, or was refused, or has undone
    it."""
    op = graph.ops[site]
    assert isinstance(op, Call)

    def short_of_it(node: int, state: int, edge: Edge) -> tuple[int, ...]:
        return () if node == site else (state,)  # in a loop it is asked again, and may be granted then

    ways = list(solve(graph, [(0, 0, NOTHING)], short_of_it, CALM).states.items())
    if asked_of(graph, op):
        none = known | {("".join(op.target), False)}
        start = [(following, 0, none) for following, edge in graph.successors[site] if edge not in RAISING]
        ways += solve(graph, start, short_of_it, CALM).states.items()
    for node, states in ways:
        if _is_left(graph.ops[node]):
            yield said_at(graph, node, states[0])
    for node, each in enumerate(graph.ops):
        if _is_left(each) and node not in left:
            yield said_at(graph, node, NOTHING)


def _is_left(op: Op) -> bool:
    return isinstance(op, Leave) and op.way is not Way.RAISE


def _goes_with_its_object(function: Function, known: Knowledge) -> bool:
    """`if self.enabled: lock.acquire()`: whoever ends it asks the same."""
    asked = {key.removesuffix(" is None").partition(".")[0] for key, _ in known}
    return not asked.isdisjoint(function.parameters)
