"""Every misuse in a project: which lives are followed, and what is made of what they show."""

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.follow import EDGES
from auditor.flow.knowledge import NOTHING
from auditor.flow.lifetime import HELD_AGAIN, Event, Life, Lifetime
from auditor.flow.limits import TooManyStates
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.operands import operands
from auditor.flow.solve import Solution, solve
from auditor.flow.spelling import spelt
from auditor.ir.graph import Graph, TooLarge
from auditor.ir.ops import ANY_ITEM, Call, Edge, Enter, Exit, Next, Path
from auditor.model import WHOLE_TREE, Span, Step
from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.modules import Function
from auditor.project.meaning.released import numbered, of_numpy, release_words, released_value
from auditor.project.meaning.sites import functions_with, site_nodes
from auditor.project.misuse.foreign import Foreign
from auditor.project.misuse.locks import Locks
from auditor.project.misuse.other_pool import differ
from auditor.project.misuse.story import name_of, place_of, story
from auditor.project.misuse.tensors import Began, Begin, Tensors
from auditor.project.misuse.tracking import Tracking
from auditor.project.misuse.twice_by_calls import Keeping, TwiceByCalls
from auditor.project.misuse.twice_by_methods import TwiceByMethods
from auditor.project.outcome import Outcome

ENTRY = 0
LAST_WORDS = {
    Fault.TWICE: "released again here",
    Fault.USED: "used here",
    Fault.ESCAPED: "a view of it leaves here",
    Fault.FOREIGN: "given to the pool here",
    Fault.OTHER_POOL: "given to another pool here",
}


@dataclass(eq=False)
class Misused(Tracking):
    """Follows every lease of the project beyond its release."""

    found: dict[tuple[Fault, Span], Misuse] = field(default_factory=dict)
    releasing: set[Function] = field(default_factory=set)  # those with a call that a protocol lists as one

    def __post_init__(self) -> None:
        self.tensors = Tensors(self.endings)

    def misuses(self, outcomes: Iterable[Outcome]) -> tuple[Misuse, ...]:
        releasing = list(self._releasing())
        self.releasing = {function for function, _ in releasing}
        for outcome in outcomes:
            if outcome.acquisition.handle is Handle.RESULT and not is_test(outcome.function):
                self._guarded(outcome.function, partial(self._lease, outcome))
        for function, calls in releasing:
            self._guarded(function, partial(self._given, function, calls))
        for function in self._handing_over():
            self._guarded(function, partial(self._handed_over, function))
        foreign = Foreign(self.project, self.recogniser, self.endings, self.calling, self.known)
        by_methods = TwiceByMethods(self.recogniser, self.endings)
        locks = Locks(self.recogniser)
        for search in (
            partial(foreign.misuses, releasing),
            partial(by_methods.misuses, releasing),
            partial(locks.misuses, releasing),
            partial(self._by_calls, by_methods.keeping),
        ):
            with self.project.confessing(WHOLE_TREE, cost="not searched for misuse: "):
                for misuse in search():
                    self.found.setdefault((misuse.fault, misuse.span), misuse)
        return tuple(sorted(self.found.values(), key=lambda each: (each.span, each.fault)))

    def _guarded(self, function: Function, follow: Callable[[], None]) -> None:
        """What is too large for leaks is too large here."""
        with (
            self.project.confessing(function.module.path, cost="not searched for misuse: "),
            suppress(TooLarge, TooManyStates, RecursionError),
        ):
            follow()

    def _by_calls(self, keeping: Callable[[], Keeping]) -> Iterator[Misuse]:
        by_calls = TwiceByCalls(self.project, self.recogniser, self.endings, self.calling, self.known)
        yield from by_calls.misuses(keeping())

    def _releasing(self) -> Iterator[tuple[Function, list[int]]]:
        """Functions with the nodes of their calls that a protocol lists as releases."""
        words = release_words(self.recogniser)
        for path in self.calling(words):
            module = self.project.module(path)
            if module is None or TEST_FILE.search(path):
                continue
            for function, calls in functions_with(module, words):
                listed = [c for c in calls if self.recogniser.release_source(function, c) is not None]
                nodes: list[int] = []
                if listed:
                    self._guarded(function, partial(_sites, function, listed, nodes))
                if nodes:
                    yield function, nodes

    def _handing_over(self) -> Iterator[Function]:
        """Functions with calls that the settings say to take over what they are given."""
        patterns = [pattern for protocol in self.recogniser.declared for pattern in protocol.transfer]
        words = {pattern.text.partition("(")[0].rpartition(".")[2] for pattern in patterns}
        for path in self.calling(words) if words else ():
            module = self.project.module(path)
            if module is not None and not TEST_FILE.search(path):
                yield from (function for function, _ in functions_with(module, words))

    # Lives --------------------------------------------------------------------------------------------------

    def _lease(self, outcome: Outcome) -> None:
        """A lease from its acquire on."""
        function, known = outcome.function, self.known(outcome.function)
        graph = function.graph
        for node in site_nodes(function, outcome.call):
            op = graph.ops[node]
            assert isinstance(op, Call)
            acquisition = self.endings.uses(function).acquisition(op)
            if node not in known or acquisition is None:
                continue
            if acquisition.value is Value.TENSOR and self._numbers(outcome):
                acquisition = replace(acquisition, value=Value.INDEX)
            began = _beginning(graph, node, op, acquisition)
            if began is None:
                continue
            span = place_of(function, node)
            first = Step(span.path, span.line, span.column, "acquired here")
            begin = Begin(function, op, acquisition, began, known[node], first)
            if began.exits is not None or outcome.lease.released or function in self.releasing:
                self._life(begin)
            if acquisition.value is Value.TENSOR:
                for misuse in self.tensors.misuses(begin):
                    self.found.setdefault((misuse.fault, misuse.span), misuse)

    def _numbers(self, outcome: Outcome) -> bool:
        """Whether what looks like a tensor are numbers of blocks."""
        made_by = (
            function
            for function, (pair, _) in self.recogniser.acquiring.items()
            if pair.name == outcome.acquisition.protocol
        )
        return numbered(outcome.lease.holder) or any(of_numpy(function) for function in made_by)

    def _life(self, begin: Begin) -> None:
        function, acquisition = begin.function, begin.acquisition
        uses = self.endings.uses(function)
        domain = Lifetime(
            function.graph, uses, acquisition.value, acquisition.protocol, exits=begin.began.exits
        )
        life = Life(begin.aliases)
        solution = solve(function.graph, begin.start(life), domain.step, EDGES["calls"])
        self._tell(function, domain, solution, begin.first)
        for release in differ(self.recogniser, function, begin.call, domain):
            for state in list(solution.states.get(release, ()))[:1]:
                self._note(function, solution, Event(Fault.OTHER_POOL, release, state), begin.first)

    def _given(self, function: Function, nodes: list[int]) -> None:
        """What a function is given, from its entry on; what it releases without our knowing whence, from
        there on."""
        graph, uses = function.graph, self.endings.uses(function)
        known = self.known(function)
        for node in nodes:
            op = graph.ops[node]
            assert isinstance(op, Call)
            for position, operand in operands(op):
                value = released_value(self.recogniser, function, op)
                if value is None or "[*]" in operand or "[:]" in operand or node not in known:
                    continue
                release = uses.release(op, position, (), value, "")
                if release is None or (release.tolerant and not self._holds_lease(function, operand)):
                    continue
                origin = _origin(graph, operand)
                given = origin[0] in graph.parameters or origin[0][0] == "@"
                if not given and _held_again(graph, operand):
                    continue  # it may have had several holds
                if given:
                    start = [(ENTRY, Life(frozenset({(origin, False)})), NOTHING)]
                else:
                    pool = release.pool and spelt(graph, release.pool)
                    released = Life(frozenset({(operand, False)}), released=node, pool=pool)
                    start = [
                        (n, released, known[node]) for n, e in graph.successors[node] if e is Edge.NORMAL
                    ]
                domain = Lifetime(graph, uses, value, "")
                solution = solve(graph, start, domain.step, EDGES["calls"])
                span = place_of(function, node)
                first = None if given else Step(span.path, span.line, span.column, "released here")
                self._tell(function, domain, solution, first)

    def _holds_lease(self, function: Function, operand: Path) -> bool:
        """A field that nothing but acquires and None are assigned to: what is closed there stays closed."""
        cls = function.cls
        if cls is None or len(operand) != 2 or operand[:1] != function.parameters[:1]:
            return False
        bound = [
            (method, node.value)
            for method in cls.methods.values()
            for node in method.nodes
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Attribute) and "." + t.attr == operand[1] for t in node.targets)
        ]
        made = [(m, v) for m, v in bound if not (isinstance(v, ast.Constant) and v.value is None)]
        return bool(made) and all(
            isinstance(value, ast.Call)
            and (source := self.recogniser.source(method, value)) is not None
            and source.handle is Handle.RESULT
            for method, value in made
        )

    def _handed_over(self, function: Function) -> None:
        """What a call took over is no longer this function's to release: `os.fdopen(fd)`, `os.close(fd)`."""
        graph, uses, known = function.graph, self.endings.uses(function), self.known(function)
        for node, op in enumerate(graph.ops):
            if not isinstance(op, Call) or node not in known:
                continue
            for position, operand in operands(op):
                if not self.recogniser.transfers(function, op.at, position):
                    continue
                taken = Life(frozenset({(operand, False)}), released=node)
                start = [(n, taken, known[node]) for n, e in graph.successors[node] if e is Edge.NORMAL]
                domain = Lifetime(graph, uses, Value.OBJECT, "", reused=True, exits=_owner(graph, op))
                solution = solve(graph, start, domain.step, EDGES["calls"])
                span = place_of(function, node)
                first = Step(span.path, span.line, span.column, "handed over here, to whom it belongs now")
                for event in domain.events:
                    if event.fault is Fault.TWICE or event.state.closed:
                        self._note(function, solution, event, first)

    # Telling ------------------------------------------------------------------------------------------------

    def _tell(
        self, function: Function, domain: Lifetime, solution: Solution[Life], first: Step | None
    ) -> None:
        for event in domain.events:
            self._note(function, solution, event, first)

    def _note(self, function: Function, solution: Solution[Life], event: Event, first: Step | None) -> None:
        milestones = {event.state.released: "released here"} if event.state.released > 0 else {}
        told = story(function, solution, event.node, event.state, first, milestones, LAST_WORDS[event.fault])
        span, steps = told.span, told.steps
        if isinstance(function.graph.ops[event.node], Exit) and event.fault is Fault.TWICE:
            span = place_of(function, event.state.released)
            again = Step(
                span.path, steps[-1].line, steps[-1].column, "the end of this `with` releases it too"
            )
            steps = (*steps[:-1], again)
        misuse = Misuse(event.fault, span, function.qualname, name_of(event.state.places), "", steps)
        self.found.setdefault((event.fault, span), misuse)


def _beginning(graph: Graph, node: int, op: Call, acquisition: Acquisition) -> Began | None:
    """Where the lease's life begins: after its acquire, or where a `with` has bound it."""
    if not (acquisition.managed or op.entered):
        return Began(node, acquisition.places)
    for number, enter in enumerate(graph.ops):
        if isinstance(enter, Enter) and enter.at is op.at:
            return Began(number, (enter.target,), enter.context)
    return None


def _owner(graph: Graph, call: Call) -> Path | None:
    """The context of `with os.fdopen(fd) as handle:`, whose end closes what it took over."""
    found = (op.context for op in graph.ops if isinstance(op, Enter) and op.at is call.at)
    return next(found, None)


def _held_again(graph: Graph, operand: Path) -> bool:
    return any(
        isinstance(op, Call)
        and op.method in HELD_AGAIN
        and any(path[:1] == operand[:1] for _, path in operands(op))
        for op in graph.ops
    )


def _origin(graph: Graph, operand: Path) -> Path:
    """An item of what a loop goes over, where all bindings of the name are such loops."""
    bindings = [op for op in graph.ops if getattr(op, "target", None) == operand[:1]]
    sources = {op.source for op in bindings if isinstance(op, Next)}
    if len(sources) == 1 and all(isinstance(op, Next) for op in bindings):
        return (*sources.pop(), ANY_ITEM, *operand[1:])
    return operand


def is_test(function: Function) -> bool:
    """A test's misuse of a pool is often its point."""
    return TEST_FILE.search(function.module.path) is not None


def _sites(function: Function, calls: Iterable[ast.Call], nodes: list[int]) -> None:
    nodes.extend(node for call in calls for node in site_nodes(function, call))
