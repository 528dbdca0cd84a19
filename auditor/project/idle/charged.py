"""Counters from which a method takes and then says no: `self.available -= size` before `return False`, or
gives less than it took."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
    Next,
    Path,
    Store,
    Way,
)
from auditor.model import Span, Step
from auditor.project.code.answers import NOTHING
from auditor.project.code.modules import Class, Function
from auditor.project.idle.charges import Counter, changed_by, charges, guarded_after, is_cut, tallies
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.pool_state import changes_state
from auditor.source.nodes import walk


def charged_for_nothing(
    cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork]
) -> Iterator[Lease]:
    """Counters of which another method gives back: `self.available = total`."""
    for work, node, counter in charges(cls, begun, later):
        yield from _Charge(work, later, node, counter).lost()


@dataclass(frozen=True)
class _Taken:
    """What was taken, the `return` that is under way, and whether a call has failed since."""

    places: frozenset[Path]
    answer: ast.Return | None = None
    failed: bool = False


@dataclass
class _Charge:
    """One statement that takes from a counter."""

    work: FieldWork
    later: Sequence[FieldWork]
    at: ast.AugAssign
    counter: Counter
    granted: bool = False

    @property
    def name(self) -> str:
        return self.counter.name

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
                if op.way is Way.RAISE and state.failed:
                    return ()  # what failed is not said here to be a refusal
                refuses = op.way is Way.RAISE or (op.way is Way.RETURN and self._refuses(state.answer))
                self.granted |= not refuses or self._is_tally(state.answer)
                if refuses:
                    lost[node, state] = Loss.RAISE if op.way is Way.RAISE else Loss.RETURN
                return ()
            if edge is Edge.CALL_RAISES and id(op.at) in self._guarded:
                return (replace(state, failed=True),)
            if edge in RAISING and (edge is not Edge.RAISE or isinstance(op.at, ast.Assert)):
                return ()  # what cannot be, or is not said here, is no refusal
            if isinstance(op, Constant | Move) and op.target == RESULT and isinstance(op.at, ast.Return):
                return (replace(state, answer=op.at),)
            ended = node == site or self._settles(op) or self._goes_back(op)
            others = ended and node != site and isinstance(op, Store | Call)
            self.granted |= others and not state.failed  # undone after a failure: kept otherwise, maybe
            return () if ended else (state,)

        known = frozenset(fact for fact in known if f".{self.name}" not in fact[0])
        counter = _Taken(frozenset({(self.function.owner or "", f".{self.name}")}))
        entries = [(to, counter, known) for to, edge in graph.successors[site] if edge is Edge.NORMAL]
        solution = solve(graph, entries, step, EDGES["calls"])
        for (node, state), loss in lost.items():
            yield self._leak(loss, node, state, shortest_path(graph, solution, node, state))

    @cached_property
    def _guarded(self) -> set[int]:
        return guarded_after(self.function, self.at)

    def _refuses(self, at: ast.Return | None) -> bool:
        if at is None:
            return False
        if is_cut(at.value, self.at.value):
            self.granted = True
            return True
        return (ast.unparse(at.value) if at.value else "None") in NOTHING or self._is_tally(at)

    def _is_tally(self, at: ast.Return | None) -> bool:
        """`return taken == n`, where `taken += 1` stands beside: all or nothing, and some are taken."""
        match at:
            case ast.Return(
                value=ast.Compare(left=ast.Name(id=tally), ops=[ast.Eq() | ast.GtE()], comparators=[wanted])
            ) if (self.name, -self.counter.way) not in self.work.counted and self.work.is_from_told(wanted):
                return tally in tallies(self.function, self.at)
        return False

    def _settles(self, op: object) -> bool:
        """It is given back, or noted in the object who has it; `self.refused += 1` only counts."""
        own = self.function.owner or ""
        match op:
            case InPlace(at=ast.AugAssign() as at) if changed_by(at, own) == self.counter:
                return False  # more is taken
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

    def _goes_back(self, op: object) -> bool:
        """`for each in done: self.left += each`: those of this call."""
        return isinstance(op, Next) and id(op.at) in self._refunding

    @cached_property
    def _refunding(self) -> set[int]:
        own, back = self.function.owner or "", Counter(self.name, -self.counter.way)
        loops = (node for node in self.function.statements if isinstance(node, ast.For))
        return {
            id(loop.target) for loop in loops if any(changed_by(each, own) == back for each in walk(loop))
        }

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
