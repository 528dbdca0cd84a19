"""A lock, or another thing that is held rather than handed out, within one function: how often it is held.

A function may be entered with the lock held. So it is followed from both, and a release without an acquire
counts only where a lock held at the entry would have been acquired a second time."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from auditor.flow.holders import held_in, moved
from auditor.flow.misuse import Fault
from auditor.flow.operands import operands
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    RAISING,
    Assume,
    Await,
    Call,
    Delete,
    Edge,
    Enter,
    Exit,
    Leave,
    Move,
    Next,
    Op,
    Path,
    Store,
)
from auditor.ir.standing import ENDS
from auditor.source.nodes import walk

QUIET = frozenset(
    {"debug", "info", "warning", "error", "exception", "log", "print", "time", "monotonic", "perf_counter",
     "get_running_loop", "get_event_loop", "current_thread", "get_ident"}
)  # fmt: skip
"""Calls that nobody expects to raise."""
IN_A_THREAD = frozenset({"run_in_executor", "to_thread", "run_sync"})


@dataclass(frozen=True, slots=True)
class Hold:
    """`count` holds; `released` is the node of the last release, -1 before one. `asked` are the places of an
    acquire's answer, and `got` what it was."""

    lock: Path
    count: int = 0
    released: int = -1
    asked: frozenset[Path] = frozenset()
    got: bool = True

    @property
    def places(self) -> frozenset[Path]:
        return frozenset({self.lock})


@dataclass(frozen=True, slots=True)
class Wrong:
    """A release of what is not held."""

    fault: Fault
    node: int
    state: Hold


class Locked:
    """The step function of one lock. `changes` says whether a call may take or give it in a way not seen."""

    def __init__(
        self,
        graph: Graph,
        lock: Path,
        acquires: frozenset[int],
        releases: frozenset[int],
        changes: Callable[[Call], bool],
        entered: int = 0,
    ) -> None:
        self.graph = graph
        self.lock = lock
        self.start = Hold(lock, entered)
        self.acquires = acquires
        self.releases = releases
        self.changes = changes
        self.awaited = _awaited(graph, acquires)
        self.wrong: list[Wrong] = []
        self.matched: set[int] = set()  # releases, by their syntax, that come after an acquire on some path
        self.taken_when_held = False

    def step(self, node: int, hold: Hold, edge: Edge) -> tuple[Hold, ...]:
        op = self.graph.ops[node]
        if isinstance(op, Leave):
            return ()
        if self._rebinds(op):
            return () if edge in RAISING else (self.start,)
        if node in self.releases:
            return self._released(node, op, hold, edge)
        if node in self.acquires:
            return (
                () if node in self.awaited.values() and edge in RAISING else self._asked(node, op, hold, edge)
            )
        if edge in RAISING:
            return () if isinstance(op, Call) and op.method in QUIET else (hold,)
        match op:
            case Await() if id(op.at) in self.awaited:
                return self._taken(hold)
            case Enter(context=context) if context == self.lock:
                return self._taken(hold)
            case Exit(context=context) if context == self.lock:
                return (replace(hold, count=max(0, hold.count - 1)),)
            case Assume() if op.subject is not None and op.subject in hold.asked and op.kind not in ENDS:
                expected = op.value if op.kind == "truth" else not op.value
                return (hold,) if expected == hold.got else ()
            case Call() if self.changes(op):
                return ()
        return (replace(hold, asked=moved(hold.asked, op)),)

    def _taken(self, hold: Hold) -> tuple[Hold, ...]:
        if hold.count > 0:
            self.taken_when_held = True
        return (replace(hold, count=hold.count + 1),) if hold.count < 3 else ()

    def _asked(self, node: int, op: Op, hold: Hold, edge: Edge) -> tuple[Hold, ...]:
        """A plain acquire waits until it has the lock; one with a limit may raise or say no."""
        assert isinstance(op, Call)
        if node in self.awaited.values():
            return (hold,)  # it is taken where it is awaited
        limited = _is_limited(op.at)
        if edge in RAISING:
            return (hold,) if limited else ()
        taken = self._taken(hold)
        if not limited:
            return taken
        yes = tuple(replace(each, asked=frozenset({op.target}), got=True) for each in taken)
        if not (_says_no(op.at) or _is_looked_at(self.graph, op)):
            return taken
        return (*yes, replace(hold, asked=frozenset({op.target}), got=False))

    def _released(self, node: int, op: Op, hold: Hold, edge: Edge) -> tuple[Hold, ...]:
        if edge in RAISING:
            return ()
        if hold.count > 0:
            self.matched.add(id(op.at))
            return (replace(hold, count=hold.count - 1, released=node),)
        wrong = Wrong(Fault.TWICE if hold.released >= 0 else Fault.FOREIGN, node, hold)
        if wrong not in self.wrong:
            self.wrong.append(wrong)
        return ()

    def _rebinds(self, op: Op) -> bool:
        """Whether the lock's name means another lock from here on."""
        if not isinstance(op, (Move, Store, Next, Delete, Enter, Await, Call)):
            return False
        return op.target == self.lock[: len(op.target)]


def _awaited(graph: Graph, acquires: frozenset[int]) -> dict[int, int]:
    """Awaits, by their syntax, that wait for an acquire below them -> the acquire's node."""
    found = {}
    for op in graph.ops:
        if isinstance(op, Await):
            below = {id(inner) for inner in walk(op.at)}
            for node in acquires:
                if id(graph.ops[node].at) in below:
                    found[id(op.at)] = node
    return found


def may_say_no(graph: Graph, call: Call) -> bool:
    """Whether it may return without the lock, and nobody looks."""
    return (_is_limited(call.at) or _says_no(call.at)) and not _is_looked_at(graph, call)


def _is_looked_at(graph: Graph, call: Call) -> bool:
    """Whether somebody looks at what the acquire says."""
    return any(
        (isinstance(op, (Move, Store)) and op.source == call.target)
        or (isinstance(op, Assume) and op.subject == call.target)
        for op in graph.ops
    )


def _is_limited(call: ast.Call) -> bool:
    return bool(call.args or call.keywords)


def _says_no(call: ast.Call) -> bool:
    """`acquire(False)` does not wait."""
    given = [*call.args[:1], *(k.value for k in call.keywords if k.arg in ("blocking", "block"))]
    return any(isinstance(value, ast.Constant) and value.value in (False, 0) for value in given)


def acquires_in_a_thread(call: Call) -> list[Path]:
    """The locks of `await loop.run_in_executor(None, lock.acquire)`."""
    if call.method not in IN_A_THREAD:
        return []
    return [path[:-1] for position, path in operands(call) if position != -1 and path[-1] == ".acquire"]


def is_given(call: Call, lock: Path) -> bool:
    return any(held_in(frozenset({lock}), path) for position, path in operands(call) if position != -1)
