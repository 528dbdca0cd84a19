"""A method that releases a field and keeps it, called twice: the second call releases it again."""

from collections.abc import Iterator

from auditor.flow.effects import Value
from auditor.flow.follow import EDGES
from auditor.flow.lifetime import Event, Life, Lifetime
from auditor.flow.limits import TooManyStates
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.solve import Solution, solve
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Call, Edge, Move, Path
from auditor.model import Step
from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import functions_with, site_nodes
from auditor.project.misuse.story import name_of, place_of, story
from auditor.project.misuse.tracking import Tracking

Keeping = dict[Function, tuple[Path, Value]]
"""Methods that surely release a field of their object, and leave it where it is."""


class TwiceByCalls(Tracking):
    """Follows the field from one call of such a method to the next."""

    def misuses(self, keeping: Keeping) -> Iterator[Misuse]:
        words = {method.name for method in keeping}
        for path in self.calling(words) if words else ():
            module = self.project.module(path)
            if module is None or TEST_FILE.search(path):
                continue
            for function, calls in functions_with(module, words):
                try:
                    nodes = [n for call in calls for n in site_nodes(function, call)]
                    yield from self._function(function, nodes, keeping)
                except (TooLarge, TooManyStates, RecursionError):
                    continue

    def _function(self, function: Function, nodes: list[int], keeping: Keeping) -> Iterator[Misuse]:
        graph = function.graph
        for node in nodes:
            call = graph.ops[node]
            assert isinstance(call, Call)
            targets = self.recogniser.calls.targets(function, call.at)[0]
            if len(targets) != 1 or targets[0] not in keeping or call.receiver is None:
                continue
            field, value = keeping[targets[0]]
            if node not in self.known(function) or not self._is_known(function, call.receiver, targets[0]):
                continue
            life = Life(frozenset({((*call.receiver, *field), False)}), released=node)
            start = [
                (n, life, self.known(function)[node]) for n, e in graph.successors[node] if e is Edge.NORMAL
            ]
            domain = Lifetime(graph, self.endings.uses(function), value, "")
            solution = solve(graph, start, domain.step, EDGES["none"])
            for event in domain.events:
                if event.fault is Fault.TWICE:
                    yield self._told(function, solution, event, node, targets[0])

    def _is_known(self, function: Function, receiver: Path, method: Function) -> bool:
        """Its own object, or one that was made here: a method's name alone says too little."""
        if function.is_method and receiver == function.parameters[:1]:
            return True
        made = [op for op in function.graph.ops if isinstance(op, Move) and op.target == receiver]
        sources = {op.source for op in made}
        return len(sources) == 1 and any(
            isinstance(op, Call)
            and op.target in sources
            and self.recogniser.calls.targets(function, op.at)[1] is method.cls
            for op in function.graph.ops
        )

    def _told(
        self, function: Function, solution: Solution[Life], event: Event, node: int, method: Function
    ) -> Misuse:
        span = place_of(function, node)
        note = f"`{method.qualname}` releases it, and keeps the field"
        first = Step(span.path, span.line, span.column, note)
        told = story(function, solution, event.node, event.state, first, {}, "released again here")
        return Misuse(Fault.TWICE, told.span, function.qualname, name_of(event.state.places), "", told.steps)
