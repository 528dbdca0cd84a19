"""Misuse of leases that are tensors: read uncleared, released under autograd's or another stream's hands."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.flow.aliases import Alias
from auditor.flow.effects import Acquisition
from auditor.flow.follow import EDGES
from auditor.flow.in_flight import Flight, InFlight
from auditor.flow.knowledge import Knowledge
from auditor.flow.leaves import Leaves
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.recorded import Recorded, Recording, switches
from auditor.flow.solve import Solution, solve
from auditor.flow.trace import State
from auditor.flow.unwritten import Unwritten, Waiting
from auditor.ir.ops import Call, Edge, Enter, Path
from auditor.model import Step
from auditor.project.code.gradients import Wanted, records
from auditor.project.code.modules import Function
from auditor.project.meaning.clearing import uncleared
from auditor.project.meaning.sites import last_name
from auditor.project.misuse.story import name_of, story
from auditor.project.misuse.uses import Endings

BEGUN = {
    "copy": "a copy begins here that nobody waits for",
    "stream": "used here on another stream",
    "transfer": "a transfer begins here",
}
ASYNCHRONOUS = frozenset({"non_blocking", "async_op"})
ASYNCHRONOUS_CALLS = frozenset({"isend", "irecv", "batch_isend_irecv", "stream", "StreamContext"})


@dataclass(frozen=True, slots=True)
class Began:
    """The node after which the lease lives, its places there, and the context whose end releases it."""

    node: int
    places: tuple[Path, ...]
    exits: Path | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """One lease to be followed: all that the analyses of its life start from."""

    function: Function
    call: Call
    acquisition: Acquisition
    began: Began
    known: Knowledge
    first: Step

    @property
    def aliases(self) -> frozenset[Alias]:
        return frozenset((place, False) for place in self.began.places)

    def start(self, state: State) -> list[tuple[int, State, Knowledge]]:
        successors = self.function.graph.successors[self.began.node]
        return [(node, state, self.known) for node, edge in successors if edge is Edge.NORMAL]


class Tensors:
    """Each analysis runs only where the function has something for it."""

    def __init__(self, endings: Endings) -> None:
        self.endings = endings
        self.model = endings.recogniser.calls.model
        self.wanted = Wanted(self.model)
        self._leaves: dict[Function, Leaves] = {}

    def misuses(self, begin: Begin) -> Iterator[Misuse]:
        if uncleared(self.endings.recogniser, begin.function, begin.call):
            yield from self._unwritten(begin)
        if records(self.model, begin.function):
            yield from self._recorded(begin)
        if _is_asynchronous(begin.function):
            yield from self._in_flight(begin)

    def _unwritten(self, begin: Begin) -> Iterator[Misuse]:
        graph = begin.function.graph
        domain = Unwritten(graph, self.endings.uses(begin.function), begin.acquisition.protocol)
        solution = solve(graph, begin.start(Waiting(begin.aliases)), domain.step, EDGES["none"])
        for node, state in domain.reads:
            yield self._told(
                Fault.UNWRITTEN, begin, solution, node, state, {}, "read here, before anything was written"
            )

    def _recorded(self, begin: Begin) -> Iterator[Misuse]:
        function = begin.function
        uses = self.endings.uses(function)
        if function not in self._leaves:
            self._leaves[function] = Leaves(function.graph, uses, self.wanted.of(function))
        domain = Recording(
            function.graph, uses, self._leaves[function], begin.acquisition.protocol, begin.began.exits
        )
        solution = solve(
            function.graph,
            begin.start(Recorded(begin.aliases, modes=modes_at(function, begin.call))),
            domain.step,
            EDGES["none"],
        )
        milestones = {node: f"`{name}` keeps it for backward" for node, name in domain.saved_at.items()}
        for node, state in domain.kept:
            why = ", ".join(sorted(set(domain.saved_at.values())))
            yield self._told(
                Fault.GRAPH,
                begin,
                solution,
                node,
                state,
                milestones,
                "released here, the graph still alive",
                why,
            )

    def _in_flight(self, begin: Begin) -> Iterator[Misuse]:
        graph = begin.function.graph
        domain = InFlight(
            graph, self.endings.uses(begin.function), begin.acquisition.protocol, begin.began.exits
        )
        solution = solve(graph, begin.start(Flight(begin.aliases)), domain.step, EDGES["none"])
        for node, state in domain.unfinished:
            milestones = {began: BEGUN[kind] for began, kind in state.begun}
            why = sorted(kind for _, kind in state.begun)[0]
            yield self._told(
                Fault.IN_FLIGHT,
                begin,
                solution,
                node,
                state,
                milestones,
                "released here, not waited for",
                why,
            )

    def _told(
        self,
        fault: Fault,
        begin: Begin,
        solution: Solution[State],
        node: int,
        state: State,
        milestones: dict[int, str],
        last_words: str,
        why: str = "",
    ) -> Misuse:
        told = story(begin.function, solution, node, state, begin.first, milestones, last_words)
        return Misuse(fault, told.span, begin.function.qualname, name_of(state.places), why, told.steps)


def modes_at(function: Function, call: Call) -> tuple[tuple[Path, bool], ...]:
    """The contexts around the acquire that switch recording, outermost first."""
    found = []
    for op in function.graph.ops:
        if not isinstance(op, Enter) or not isinstance(op.at, ast.Call):
            continue
        on = switches(last_name(op.at), op.at)
        if on is not None and _surrounds(function, op.at, call.at):
            found.append((op.context, on))
    return tuple(dict.fromkeys(found))


def _surrounds(function: Function, context: ast.Call, inner: ast.Call) -> bool:
    """Whether `inner` is in the body of the `with` of this context expression, or one of its later items."""
    for node in function.nodes:
        if not isinstance(node, (ast.With, ast.AsyncWith)):
            continue
        expressions = [item.context_expr for item in node.items]
        if context in expressions:
            later = expressions[expressions.index(context) + 1 :]
            return inner in later or node.body[0].lineno <= inner.lineno <= (node.body[-1].end_lineno or 0)
    return False


def _is_asynchronous(function: Function) -> bool:
    """Whether anything in the function can be left unfinished."""
    for call in function.calls:
        if last_name(call) in ASYNCHRONOUS_CALLS or any(key.arg in ASYNCHRONOUS for key in call.keywords):
            return True
    return False
