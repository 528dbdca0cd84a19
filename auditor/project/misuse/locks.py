"""Locks and what is like them: released on a path that never took them, or taken once and released twice."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from auditor.flow.effects import Handle
from auditor.flow.follow import EDGES
from auditor.flow.knowledge import NOTHING
from auditor.flow.limits import TooManyStates
from auditor.flow.locked import Hold, Locked, Wrong, acquires_in_a_thread, is_given, may_say_no
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.solve import Solution, solve
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Call, Capture, Path
from auditor.model import Step
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.misuse.story import name_of, place_of, story
from auditor.source.nodes import walk

ENTRY = 0
LEFT_BY = {"__exit__": "__enter__", "__aexit__": "__aenter__"}
LAST_WORDS = {
    Fault.TWICE: "released again here",
    Fault.FOREIGN: "released here, where it was not taken",
}


@dataclass(slots=True)
class Calls:
    """The nodes of one function that take and give one lock."""

    acquires: set[int] = field(default_factory=set)
    releases: set[int] = field(default_factory=set)


class Locks:
    """Looks at functions that both take a lock and give it back."""

    def __init__(self, recogniser: Recogniser) -> None:
        self.recogniser = recogniser
        self.names = {
            protocol.name
            for protocol in (*recogniser.declared, *recogniser.built_in)
            if protocol.handle is Handle.RECEIVER
        }

    def misuses(self, releasing: Iterable[tuple[Function, list[int]]]) -> Iterator[Misuse]:
        if not self.names:
            return
        for function, nodes in releasing:
            try:
                yield from self._function(function, nodes)
            except (TooLarge, TooManyStates, RecursionError):
                continue

    def _function(self, function: Function, nodes: list[int]) -> Iterator[Misuse]:
        locks: dict[Path, Calls] = {}
        ops = function.graph.ops
        for node in nodes:
            call = ops[node]
            if isinstance(call, Call) and call.receiver is not None and self._is_lock(function, call):
                locks.setdefault(call.receiver, Calls()).releases.add(node)
        if not locks:
            return
        for node, op in enumerate(ops):
            if isinstance(op, Call):
                for lock in self._acquired(function, op):
                    if lock in locks:
                        locks[lock].acquires.add(node)
        for lock, calls in locks.items():
            if calls.acquires and not self._captured(function, lock):
                yield from self._lock(function, lock, calls)
            elif not calls.acquires and function.name in LEFT_BY:
                yield from self._left(function, lock, calls)

    def _left(self, function: Function, lock: Path, calls: Calls) -> Iterator[Misuse]:
        """`__exit__` releases what `__enter__` only tried to take, whatever came of it."""
        entering = function.cls.methods.get(LEFT_BY[function.name]) if function.cls is not None else None
        if entering is None or len(lock) < 2 or not function.parameters or lock[0] != function.parameters[0]:
            return
        own = (*entering.parameters[:1], *lock[1:])
        calls_there = [op for op in entering.graph.ops if isinstance(op, Call)]
        asked = [op for op in calls_there if own in self._acquired(entering, op)]
        if not asked or not all(may_say_no(entering.graph, op) for op in asked):
            return
        first = place_of(entering, entering.graph.ops.index(asked[0]))
        name = f"`self{''.join(lock[1:])}`"
        for node in sorted(calls.releases):
            if not _is_asked(function, node):
                at = place_of(function, node)
                steps = (
                    Step(first.path, first.line, first.column, "may not get it, and nobody looks"),
                    Step(at.path, at.line, at.column, LAST_WORDS[Fault.FOREIGN]),
                )
                yield Misuse(Fault.FOREIGN, at, function.qualname, name, "lock", steps)

    def _is_lock(self, function: Function, call: Call) -> bool:
        source = self.recogniser.release_source(function, call.at)
        return source is not None and source[0] in self.names

    def _acquired(self, function: Function, call: Call) -> list[Path]:
        source = self.recogniser.source(function, call.at)
        if source is not None and source.protocol in self.names and call.receiver is not None:
            return [call.receiver]
        return acquires_in_a_thread(call)

    def _captured(self, function: Function, lock: Path) -> bool:
        """A function made here may take it or give it when nobody looks."""
        return any(isinstance(op, Capture) and lock[0] in op.names for op in function.graph.ops)

    def _lock(self, function: Function, lock: Path, calls: Calls) -> Iterator[Misuse]:
        free, solution = self._followed(function, lock, calls, 0)
        if not free.wrong:
            return
        held, _ = self._followed(function, lock, calls, 1)
        told = set()
        for wrong in free.wrong:
            at = function.graph.ops[wrong.node].at
            paired = id(at) in free.matched or _tidies_up(function, at, calls)
            if wrong.fault is Fault.FOREIGN and not (held.taken_when_held and paired):
                continue
            if (wrong.fault, id(at)) not in told:
                told.add((wrong.fault, id(at)))
                yield self._told(function, wrong, solution)

    def _followed(
        self, function: Function, lock: Path, calls: Calls, count: int
    ) -> tuple[Locked, Solution[Hold]]:
        domain = Locked(
            function.graph,
            lock,
            frozenset(calls.acquires),
            frozenset(calls.releases),
            lambda call: is_given(call, lock) or self._changes(function, call, lock),
            count,
        )
        start = [(ENTRY, domain.start, NOTHING)]
        return domain, solve(function.graph, start, domain.step, EDGES["calls"])

    def _changes(self, function: Function, call: Call, lock: Path) -> bool:
        """Whether what is called may take or give the same lock."""
        name = lock[-1].lstrip(".")
        for target in self.recogniser.calls.targets(function, call.at)[0]:
            text = ast.unparse(target.node) if not isinstance(target.node, ast.Module) else ""
            if name in text and ("acquire" in text or "release" in text):
                return True
        return False

    def _told(self, function: Function, wrong: Wrong, solution: Solution[Hold]) -> Misuse:
        milestones = {wrong.state.released: "released here"} if wrong.state.released >= 0 else {}
        last_words = LAST_WORDS[wrong.fault]
        told = story(function, solution, wrong.node, wrong.state, None, milestones, last_words)
        name = name_of(wrong.state.places)
        return Misuse(wrong.fault, told.span, function.qualname, name, "lock", told.steps)


def _is_asked(function: Function, node: int) -> bool:
    """Whether the release stands under a condition."""
    at = function.graph.ops[node].at
    return any(
        isinstance(each, (ast.If, ast.IfExp, ast.BoolOp)) and any(inner is at for inner in walk(each))
        for each in function.nodes
    )


def _tidies_up(function: Function, at: ast.AST, calls: Calls) -> bool:
    """Whether it stands in a handler or a `finally` of what takes the lock."""
    taking = {id(function.graph.ops[node].at) for node in calls.acquires}
    for each in function.nodes:
        if isinstance(each, ast.Try):
            after = [*each.finalbody, *(statement for handler in each.handlers for statement in handler.body)]
            inside = any(inner is at for statement in after for inner in walk(statement))
            if inside and taking & {id(inner) for statement in each.body for inner in walk(statement)}:
                return True
    return False
