"""Counters from which a method takes and then says no: `self.available -= size` before `return False`."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.flow.follow import EDGES, known_at_nodes
from auditor.flow.lease import Leak, Lease, Loss
from auditor.flow.limits import TooManyStates
from auditor.flow.solve import solve
from auditor.flow.trace import Station, shortest_path, span_of, tell
from auditor.ir.graph import TooLarge
from auditor.ir.ops import (
    RAISING,
    RESULT,
    Call,
    Constant,
    Delete,
    Edge,
    InPlace,
    Leave,
    Move,
    Path,
    Store,
    Way,
)
from auditor.model import Span, Step
from auditor.project.code.bindings import assignments, own_attribute, suites_of
from auditor.project.code.modules import Class, Function
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.leases.refusals import NOTHING
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.pool_state import changes_state
from auditor.protocols.vocabulary import RELEASE_WORDS, split
from auditor.source.nodes import walk


def charged_for_nothing(
    cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork]
) -> Iterator[Lease]:
    """Of what is full at first and comes back by another method: `self.available = total`."""
    raised = {(name, work.method.name) for work in later for name, way in work.counted if way > 0}
    lowered = {name for work in later for name, way in work.counted if way < 0}
    counters = {name for name, _ in raised} & lowered
    counters = {name for name in counters if _is_full_at_first(name, begun) and not _is_reset(name, later)}
    for work in later if counters else ():
        if work.method.cls is not cls or not RELEASE_WORDS.isdisjoint(split(work.method.name)):
            continue
        for node, name in _charges(work, counters):
            others = {method for each, method in raised if each == name} - {work.method.name}
            if others and (_is_measured(work, name) or _tallies(work.method, node)):
                yield from _Charge(work, later, node, name).lost()


def _is_full_at_first(name: str, begun: Sequence[FieldWork]) -> bool:
    """It is told how many there are, or there are several."""
    for work in begun:
        for at, value in assignments(work.method):
            if own_attribute(at, work.method.owner or "") == name:
                several = isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value > 1
                return several or work.is_from_told(value)
    return False


def _is_reset(name: str, later: Sequence[FieldWork]) -> bool:
    """`self.patience = self.start`: nobody has to give back what runs anew by itself."""
    return any(
        own_attribute(at, work.method.owner or "") == name
        for work in later
        for at, _ in assignments(work.method)
    )


def _charges(work: FieldWork, counters: set[str]) -> Iterator[tuple[ast.AugAssign, str]]:
    for node in work.method.statements:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub):
            name = own_attribute(node.target, work.method.owner or "")
            if name in counters and name is not None:
                yield node, name


def _is_measured(work: FieldWork, name: str) -> bool:
    """The method asks whether there is enough, `if self.available < 0:`; who counts users asks whether it was
    the last."""
    own = work.method.owner or ""
    return any(
        own_attribute(side, own) == name
        for node in work.method.nodes
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        for side in (node.left, *node.comparators)
    )


def _tallies(function: Function, charge: ast.AugAssign) -> set[str]:
    """`taken += 1`, beside."""
    beside = next((suite for suite in suites_of(function.node) if charge in suite), [])
    counts = (node for node in beside if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add))
    return {node.target.id for node in counts if isinstance(node.target, ast.Name)}


@dataclass(frozen=True)
class _Taken:
    """What was taken, and the `return` that is under way."""

    places: frozenset[Path]
    answer: ast.Return | None = None


@dataclass
class _Charge:
    """One statement that takes from a counter."""

    work: FieldWork
    later: Sequence[FieldWork]
    at: ast.AugAssign
    name: str
    granted: bool = False

    @property
    def function(self) -> Function:
        return self.work.method

    def lost(self) -> Iterator[Lease]:
        graph = self.function.graph
        sites = [n for n, op in enumerate(graph.ops) if isinstance(op, InPlace) and op.at is self.at]
        try:
            leaks = tuple(leak for site in sites for leak in self._leaks(site))
        except (TooLarge, TooManyStates, RecursionError):
            return  # of what is not followed nothing is said
        if leaks and self.granted:
            yield Lease(
                span=self._span(self.at),
                symbol=self.function.qualname,
                text=" ".join(ast.unparse(self.at).split()),
                protocol=self.function.cls.name if self.function.cls is not None else "",
                holder=f"self.{self.name}",
                leaks=leaks,
                handed_over=True,
            )

    def _leaks(self, site: int) -> Iterator[Leak]:
        graph = self.function.graph
        known = known_at_nodes(graph).get(site)
        if known is None:
            return
        lost: dict[tuple[int, _Taken], Loss] = {}

        def step(node: int, state: _Taken, edge: Edge) -> tuple[_Taken, ...]:
            op = graph.ops[node]
            if isinstance(op, Leave):
                refuses = op.way is Way.RAISE or (op.way is Way.RETURN and self._refuses(state.answer))
                self.granted |= not refuses or self._is_tally(state.answer)
                if refuses:
                    lost[node, state] = Loss.RAISE if op.way is Way.RAISE else Loss.RETURN
                return ()
            if edge in RAISING and (edge is not Edge.RAISE or isinstance(op.at, ast.Assert)):
                return ()  # what cannot be, or is not said here, is no refusal
            if isinstance(op, Constant | Move) and op.target == RESULT and isinstance(op.at, ast.Return):
                return (replace(state, answer=op.at),)
            ended = node == site or self._settles(op)
            self.granted |= ended and node != site and isinstance(op, Store | Call)
            return () if ended else (state,)

        known = frozenset(fact for fact in known if f".{self.name}" not in fact[0])
        counter = _Taken(frozenset({(self.function.owner or "", f".{self.name}")}))
        entries = [(to, counter, known) for to, edge in graph.successors[site] if edge is Edge.NORMAL]
        solution = solve(graph, entries, step, EDGES["calls"])
        for (node, state), loss in lost.items():
            yield self._leak(loss, node, state, shortest_path(graph, solution, node, state))

    def _refuses(self, at: ast.Return | None) -> bool:
        if at is None:
            return False
        return (ast.unparse(at.value) if at.value else "None") in NOTHING or self._is_tally(at)

    def _is_tally(self, at: ast.Return | None) -> bool:
        """`return taken == n`, where `taken += 1` stands beside: all or nothing, and some are taken."""
        match at:
            case ast.Return(
                value=ast.Compare(left=ast.Name(id=tally), ops=[ast.Eq() | ast.GtE()], comparators=[wanted])
            ) if (self.name, 1) not in self.work.counted and self.work.is_from_told(wanted):
                return tally in _tallies(self.function, self.at)
        return False

    def _settles(self, op: object) -> bool:
        """It is given back, or noted in the object who has it; `self.refused += 1` only counts."""
        own = self.function.owner or ""
        match op:
            case InPlace(target=target):
                return target[0] == own and (len(target) != 2 or self._goes_down(target[1].lstrip(".")))
            case Store(target=target) | Delete(target=target):
                return target[0] == own
            case Call(receiver=None, args=args):
                return any(path == (own,) for path, _ in args)
            case Call(receiver=(first, *rest), method=name) if first == own:
                method = next((w.method for w in self.later if w.method.name == name), None)
                reads = method is not None and not rest and not changes_state(method)
                return not reads and not self._is_asked(op.at)
        return False

    def _goes_down(self, name: str) -> bool:
        """Or is the counter itself."""
        return name == self.name or any((name, -1) in work.counted for work in self.later)

    def _is_asked(self, call: ast.Call) -> bool:
        """`if self.owners.get(key) == key:`"""
        tests = (node.test for node in self.function.nodes if isinstance(node, ast.If | ast.While))
        return getattr(call.func, "attr", "") == "get" and any(
            call is each for t in tests for each in walk(t)
        )

    # How it is told -----------------------------------------------------------------------------------------

    def _leak(self, loss: Loss, node: int, state: _Taken, path: list[Station]) -> Leak:
        graph, module = self.function.graph, self.function.module
        raised = [graph.ops[station.node].at for station in path if station.edge is Edge.RAISE]
        at, first = self._span([state.answer or graph.ops[node].at, *raised][-1]), self._span(self.at)
        steps: list[Step] = [Step(module.path, first.line, first.column, "taken here")]
        steps += tell(graph, module.path, path, module.lines)
        steps.append(Step(module.path, at.line, at.column, LAST_WORDS[loss]))
        return Leak(loss, at, f"self.{self.name}", tuple(steps))

    def _span(self, at: ast.AST) -> Span:
        return span_of(self.function.module.path, at, self.function.module.lines)
