"""Tensors that a pool is given though no pool handed them out: made here, or passed by every caller."""

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property

from auditor.flow.effects import BORROWED, Value
from auditor.flow.follow import EDGES
from auditor.flow.lifetime import Event, Life, Lifetime
from auditor.flow.limits import TooManyStates
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.operands import operands
from auditor.flow.solve import Solution, solve
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Call, Edge, Fresh, Move, Op, Path
from auditor.model import Step
from auditor.project.code.bindings import TEST_FILE
from auditor.project.code.gradients import Wanted
from auditor.project.code.modules import Function
from auditor.project.meaning.released import released_value
from auditor.project.meaning.sites import functions_with, site_nodes
from auditor.project.misuse.story import name_of, place_of, story
from auditor.project.misuse.tracking import Tracking
from auditor.protocols.tensor_accesses import makes_leaf, module_keeps_input
from auditor.protocols.tensor_operations import treatment_of

Releasing = Sequence[tuple[Function, list[int]]]


class Foreign(Tracking):
    """Follows tensors that are surely no leases to the calls that give them to a pool."""

    @cached_property
    def wanted(self) -> Wanted:
        return Wanted(self.recogniser.calls.model)

    def misuses(self, releasing: Releasing) -> Iterator[Misuse]:
        of_tensors = [(function, self._of_tensors(function, nodes)) for function, nodes in releasing]
        for function, nodes in of_tensors:
            yield from self._made_here(function, nodes)
        yield from self._passed_on(self._releasing_parameters(of_tensors))

    def _of_tensors(self, function: Function, nodes: list[int]) -> list[int]:
        """Releases of tensors: lists and tensors of slot numbers are made by anybody."""
        return [
            node
            for node in nodes
            if isinstance(call := function.graph.ops[node], Call)
            and released_value(self.recogniser, function, call) is Value.TENSOR
        ]

    def _made_here(self, function: Function, nodes: list[int]) -> Iterator[Misuse]:
        for event, solution, origin in self._followed(function, nodes):
            yield self._told(function, event, solution, origin)

    def _followed(self, function: Function, nodes: list[int]) -> Iterator[tuple[Event, Solution[Life], int]]:
        if not nodes:
            return
        graph, uses = function.graph, self.endings.uses(function)
        roots = _flowing_to(graph.ops, {path[0] for n in nodes for path in _given(graph.ops[n])})
        origins = [n for n, op in enumerate(graph.ops) if self._is_new(function, op, roots)]
        known = self.known(function) if origins else {}
        for origin in origins:
            if origin not in known:
                continue
            op = graph.ops[origin]
            assert isinstance(op, (Fresh, Call))
            life = Life(frozenset({(op.target, False)}))
            domain = Lifetime(graph, uses, Value.TENSOR, "", foreign=True)
            start = [(n, life, known[origin]) for n, edge in graph.successors[origin] if edge is Edge.NORMAL]
            try:
                solution = solve(graph, start, domain.step, EDGES["none"])
            except TooManyStates:
                continue
            for event in domain.events:
                yield event, solution, origin

    def _is_new(self, function: Function, op: Op, roots: set[str]) -> bool:
        if not isinstance(op, (Fresh, Call)) or op.target[0] not in roots:
            return False
        if isinstance(op, Fresh):
            return isinstance(op.at, ast.BinOp)
        if op.is_told_where:
            return False
        module = self.endings.uses(function).module_class(op)
        if module is not None:
            return module_keeps_input(module)  # not Identity or Dropout, which may return what they are given
        targets, constructed, dotted = self.recogniser.calls.targets(function, op.at)
        if targets or constructed is not None or self.endings.uses(function).acquisition(op) is not None:
            return False
        if op.receiver is not None and self._is_parameter(function, op.receiver):
            treatment = treatment_of(op.method)
            return treatment is not None and treatment.result == ()
        if dotted is not None:
            return dotted.startswith("torch.") and (
                makes_leaf(op.method) or treatment_of(op.method) == BORROWED
            )
        return op.receiver is not None and op.method == "clone"

    def _is_parameter(self, function: Function, path: Path) -> bool:
        """`self.weight` of a module, which no pool handed out."""
        own = function.is_method and len(path) == 2 and path[:1] == function.parameters[:1]
        return own and path[1].lstrip(".") in self.wanted.trained(function)

    # Through functions that give back what they are given ---------------------------------------------------

    def _releasing_parameters(self, releasing: Releasing) -> dict[Function, list[int]]:
        found: dict[Function, list[int]] = {}
        for function, nodes in releasing:
            direct = [
                n
                for n in nodes
                if any(len(p) == 1 and p[0] in function.parameters for p in _given(function.graph.ops[n]))
            ]
            if direct:
                found[function] = direct
        return found

    def _passed_on(self, callees: dict[Function, list[int]]) -> Iterator[Misuse]:
        """If every caller passes what is no lease, the callee's release is wrong, else those callers'."""
        words = {function.name for function in callees}
        calls: dict[Function, int] = {}
        foreign: dict[Function, list[Misuse]] = {}
        for path in self.calling(words) if words else ():
            module = self.project.module(path)
            if module is None or TEST_FILE.search(path):
                continue
            for function, called in functions_with(module, words):
                for callee, misuse in self._caller(function, called, callees, calls):
                    foreign.setdefault(callee, []).append(misuse)
        for callee, found in foreign.items():
            if len(found) < calls[callee]:
                yield from found
                continue
            for node in callees[callee]:
                span = place_of(callee, node)
                yield Misuse(Fault.FOREIGN, span, callee.qualname, found[0].lease, "caller", found[0].trace)

    def _caller(
        self,
        function: Function,
        called: list[ast.Call],
        callees: dict[Function, list[int]],
        calls: dict[Function, int],
    ) -> Iterator[tuple[Function, Misuse]]:
        nodes = {}
        for call in called:
            for target in self.recogniser.calls.targets(function, call)[0]:
                if target in callees:
                    calls[target] = calls.get(target, 0) + 1
                    try:
                        nodes.update(dict.fromkeys(site_nodes(function, call), target))
                    except (TooLarge, RecursionError):
                        continue
        if not nodes:
            return
        for event, solution, origin in self._followed(function, list(nodes)):
            if event.node in nodes:
                yield nodes[event.node], self._told(function, event, solution, origin)

    def _told(self, function: Function, event: Event, solution: Solution[Life], origin: int) -> Misuse:
        made = place_of(function, origin)
        first = Step(made.path, made.line, made.column, "made here, by no pool")
        told = story(function, solution, event.node, event.state, first, {}, "given to the pool here")
        return Misuse(
            Fault.FOREIGN, told.span, function.qualname, name_of(event.state.places), "", told.steps
        )


def _given(op: Op) -> list[tuple[str, ...]]:
    return [path for position, path in operands(op) if position != -1] if isinstance(op, Call) else []


def _flowing_to(ops: Sequence[Op], names: set[str]) -> set[str]:
    """Roots whose values may be moved into `names`."""
    moves = [(op.target[0], op.source[0]) for op in ops if isinstance(op, Move)]
    return _closed(names, [(target, source) for target, source in moves])


def _closed(names: set[str], steps: list[tuple[str, str]]) -> set[str]:
    found = set(names)
    while True:
        more = {there for here, there in steps if here in found} - found
        if not more:
            return found
        found |= more
