"""How a lease that was followed was lost: by which kind of way out, where, and the path that leads there."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from functools import cached_property, partial

from auditor.flow.decisive import decisive
from auditor.flow.effects import Handle
from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.flow.lease import Leak, Loss
from auditor.flow.trace import (
    SETTING,
    Station,
    path_by_its_own_failure,
    path_by_what_is_raised,
    path_that_closes,
    shortest_path,
    span_of,
    tell,
)
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    RAISING,
    Assume,
    Call,
    Edge,
    Enter,
    Exit,
    Leave,
    Move,
    Op,
    Path,
    Store,
    is_temporary,
)
from auditor.model import Span, Step
from auditor.project.code.guards import (
    WITHS,
    caught_by,
    caught_names,
    comes_and_goes,
    encloses,
    in_a_finally,
    swallows,
)
from auditor.project.code.modules import Function
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.leases.raised_for_want import gathered_beside, raises_for_want
from auditor.project.meaning.effects import FunctionEffects
from auditor.project.meaning.written_raises import ALL
from auditor.protocols.vocabulary import split

BROAD = re.compile(
    r"Exception\b|RuntimeError|MemoryError|OSError|ValueError|IOError|EnvironmentError|\b(?:socket|select)\.error\b"
)
"""Failures that work on a lease is expected to have; the last four are other names of OSError."""

READING = frozenset({"read", "readline", "readlines", "write", "writelines", "seek", "tell", "flush"})
OPENED = re.compile(r"(?:^|\.)(?:open|fdopen|mkstemp|\w*TemporaryFile)$")
"""What goes wrong with a file goes wrong when it is opened: a handler around that and the reading is meant
for that. The other end of a socket or a pipe may go away at any time."""

AFTER_OPENING = re.compile(
    r"Unicode\w*Error|DecodeError|\bValueError|EOFError|BadZip|UnpicklingError|ParseError|ParserError|YAMLError|struct\.error|csv\.Error"
)
"""Failures of what is read, which no opening has."""

STARTING = frozenset(
    {"create_task", "ensure_future", "submit", "run_coroutine_threadsafe", "Thread", "start_soon"}
)

TASKS = frozenset({"create_task", "ensure_future", "start_soon"})

UNWRITTEN = frozenset({Loss.CALL, Loss.CANCEL, Loss.CLOSE})
"""Ways out by an exception that no `raise` or `assert` of the function spells."""

LOSS_OF_EDGE = {
    Edge.CALL_RAISES: Loss.CALL,
    Edge.CANCEL: Loss.CANCEL,
    Edge.CLOSE: Loss.CLOSE,
    Edge.RAISE: Loss.RAISE,
}


class Losses:
    """Tells the losses of one function's leases."""

    def __init__(self, function: Function, effects: FunctionEffects, exceptions: str) -> None:
        self.function = function
        self.graph: Graph = function.graph
        self.effects = effects
        self.exceptions = exceptions
        self._acquired_names: dict[Path, tuple[str, ast.Call]] | None = None

    def leaks(self, site: int, followed: Followed) -> Iterable[Leak]:
        """Each kind of loss at each place once, with the path that leads there; the shortest path first. That
        another acquire may fail for want is no news of what is lost where nothing fails."""
        seen: set[tuple[Loss, Span]] = set()
        ways = [
            (*self._likeliest(loss, followed, node, held, site), node, held)
            for loss, node, held in followed.endings.lost
        ]
        ways += [
            (path, Loss.CLOSE, node, held)
            for loss, node, held in followed.endings.lost
            if loss is Loss.RAISE
            and self._yields
            and (path := path_that_closes(self.graph, followed.solution, node, held)) is not None
        ]
        ways += [
            (path, self._exceptional(path), node, held)
            for loss, node, held in followed.endings.lost
            if loss is Loss.RAISE
            for path in self._by_what_is_raised(followed, node, held)
        ]
        found: list[Leak] = []
        for_want: list[Leak] = []
        for path, kind, node, held in sorted(ways, key=lambda way: len(way[0])):
            at = self._where(node, path)
            if (
                self._asserted_away(path, site)
                or (kind, at) in seen
                or (self.exceptions == "explicit" and kind in UNWRITTEN)
                or (kind is Loss.CALL and self._by_what_cannot_fail(path))
            ):
                continue
            seen.add((kind, at))
            ends = [(node, other) for _, there, other in followed.endings.lost if there == node]
            steps = self._trace(site, decisive(self.graph, followed.solution, path, ends), kind, at)
            failed, started = self._failed(path, site), self._starts(path)
            if kind is Loss.CALL and failed is None and self._spelled_out(path):
                kind = Loss.RAISE
            leak = Leak(kind, at, _name_of(held), steps, failed, started, held.parted)
            wanted = kind is Loss.CALL and failed is not None and self._for_want(path, site)
            (for_want if wanted else found).append(leak)
        begun = self.graph.ops[site]
        acquisition = self.effects.acquisition(begun) if isinstance(begun, Call) else None
        permit = (
            acquisition is not None and acquisition.handle is Handle.RECEIVER
        )  # it goes with what is returned
        news = permit or not any(leak.loss in ORDINARY for leak in found)
        told = (replace(each, loss=Loss.RAISE, failed=each.failed if news else None) for each in for_want)
        return [*told, *found]

    def _by_what_cannot_fail(self, path: list[Station]) -> bool:
        """`receipt = tree.lock(node).to_receipt()`: the second call only says what the first has answered."""
        raised = [station for station in path if station.edge in LOSS_OF_EDGE]
        op = self.graph.ops[raised[-1].node] if len(raised) == 1 else None
        return isinstance(op, Call) and self.effects.only_says_what_it_has(op.at)

    @cached_property
    def _yields(self) -> bool:
        return any(edge is Edge.CLOSE for onward in self.graph.successors for _, edge in onward)

    def _likeliest(
        self, loss: Loss, followed: Followed, node: int, held: Held, site: int
    ) -> tuple[list[Station], Loss]:
        """The shortest path; another if that blames a call which was not given the lease, and it does not."""
        path = shortest_path(self.graph, followed.solution, node, held)
        kind = self._kind(loss, path, site)
        if kind in UNWRITTEN and kind is not loss and loss not in IN_PASSING | {Loss.RAISE, Loss.DISCARDED}:
            harmless = self.effects.contains_failures
            other = path_by_its_own_failure(self.graph, followed.solution, node, held, harmless)
            if other is not None and self._kind(loss, other, site) is loss:
                return other, loss
            for other in self._by_what_is_raised(followed, node, held):
                if self._kind(loss, other, site) is loss:
                    return other, loss
        return path, kind

    def _by_what_is_raised(self, followed: Followed, node: int, held: Held) -> Iterator[list[Station]]:
        """The ways by which failures go that a call of the function spells out: to the handlers for them."""
        for op in self.graph.ops:
            raised = self.effects.raises(op.at) if isinstance(op, Call) else frozenset()
            if raised:
                through = partial(_is_meant_for, raised)
                way = path_by_what_is_raised(self.graph, followed.solution, node, held, op.at, through)
                if way is not None:
                    yield way

    def _kind(self, loss: Loss, path: list[Station], site: int) -> Loss:
        """An ordinary loss that needs an unlikely exception on the way is a loss by that exception."""
        if loss is Loss.RAISE:
            return self._exceptional(path)
        raised = next((station.edge for station in path if station.edge in LOSS_OF_EDGE), None)
        if loss is Loss.DISCARDED and raised is not None:
            return LOSS_OF_EDGE[raised]  # an intermediate value that an exception passed by
        for index, station in enumerate(path):
            if station.edge not in LOSS_OF_EDGE:
                continue
            in_passing = loss in IN_PASSING and station.edge is not Edge.RAISE
            unwinding = in_passing and not self._caught(path[index:])
            if unwinding or not self._expected(station, path[index:], site):
                return LOSS_OF_EDGE[station.edge]
        return loss

    def _exceptional(self, path: list[Station]) -> Loss:
        """By which kind of exception a path that leaves by raising does so.

        A handler that passes on what a call raised is a `raise` of the function's own, unless that call
        cannot fail.
        """
        raised = [station for station in path if station.edge in LOSS_OF_EDGE]
        if not raised:
            return Loss.RAISE
        last = self.graph.ops[raised[-1].node].at
        if isinstance(last, ast.Raise) and last.exc is None and len(raised) > 1:
            first = self.graph.ops[raised[-2].node]
            if isinstance(first, Call) and self.effects.contains_failures(first.at):
                return Loss.CALL
        return LOSS_OF_EDGE[raised[-1].edge]

    def _caught(self, onward: list[Station]) -> bool:
        """Whether the exception ends on the way, in a handler or a `suppress`."""
        guards = [self.graph.ops[station.node].at for station in onward]
        return any(
            isinstance(at, ast.ExceptHandler) or (isinstance(at, WITHS) and swallows(at)) for at in guards
        )

    def _expected(self, station: Station, onward: list[Station], site: int) -> bool:
        """Whoever wrote the handler meant this: a raise of his own, an await, another acquire, work on the
        lease itself; or the `try` begins after the acquire, so that it is held whatever raised."""
        op, acquired = self.graph.ops[station.node], self.graph.ops[site]
        line = self.span(acquired.at).line
        if isinstance(op, Enter | Exit) and comes_and_goes(op.at, line):
            return False
        if station.edge is Edge.RAISE or not isinstance(op, Call):
            return True
        if self._in_passing(op, station):
            return False
        acquisition = self.effects.acquisition(acquired) if isinstance(acquired, Call) else None
        declared = acquisition is not None and acquisition.declared
        holds = station.holds or (declared and station.uses)
        if self.effects.acquisition(op) is not None:
            return True
        opened = acquisition is not None and OPENED.search(acquisition.text) is not None
        if op.method in SETTING or self.effects.contains_failures(op.at):
            return False
        if op.method in READING and opened:
            return self._guarded_since(onward, line) or self._for_what_is_read(onward)
        if holds and opened and self._for_what_is_read(onward):
            return True
        if holds and self._broadly(onward, line) and not self._for_the_acquire(acquired, onward):
            return True
        if isinstance(acquired, Call) and self._for_the_others(acquired, station, onward):
            return True
        return self._guarded_since(onward, line) or self._raised_for(op.at, onward)

    def _in_passing(self, op: Call, station: Station) -> bool:
        """The coroutine of a task raises in the task; what is asked before the release in a `finally` is not
        what its handler is for."""
        if any(
            isinstance(other, Call) and other.method in TASKS and _given(other, op)
            for other in self.graph.ops
        ):
            return True
        return not station.holds and in_a_finally(self.function.node, op.at)

    def _for_the_acquire(self, acquired: Op, onward: list[Station]) -> bool:
        """`except ZKLockException` around `zk.lockNode(node)` says what that one raises."""
        asked = (
            [word for word in split(acquired.method) if len(word) > 3] if isinstance(acquired, Call) else []
        )
        named = filter(None, (caught_by(self.graph.ops[later.node].at) for later in onward))
        return any(word in caught.rpartition(".")[2].lower() for caught in named for word in asked)

    def _for_the_others(self, acquired: Call, station: Station, onward: list[Station]) -> bool:
        """A handler below the one for what the acquire itself raises, in a `try` that begins with it or for
        work on the lease."""
        raised, line = self.effects.raises(acquired.at), self.span(acquired.at).line
        there = [self.graph.ops[later.node].at for later in onward] if raised else []
        for guard in there:
            if not isinstance(guard, ast.Try) or not encloses(guard, line):
                continue
            if any(handler in there for handler in guard.handlers):
                first = guard.body[0].lineno <= line <= (guard.body[0].end_lineno or 0)
                above = itertools.takewhile(lambda handler: handler not in there, guard.handlers)
                own = any(not raised.isdisjoint(re.findall(r"\w+", caught_by(each) or "")) for each in above)
                return own and (first or station.holds or station.uses)
        return False

    def _raised_for(self, call: ast.Call, onward: list[Station]) -> bool:
        """The function that is called raises, in so many words, what the handler names."""
        named = " ".join(filter(None, (caught_by(self.graph.ops[later.node].at) for later in onward)))
        caught = frozenset(re.findall(r"\w+", named)) - {"suppress", "contextlib"}
        return bool(caught) and not caught.isdisjoint(self.effects.raises(call))

    def _guarded_since(self, onward: list[Station], line: int) -> bool:
        """By a `try` that begins after the acquire."""
        guards = (self.graph.ops[later.node].at for later in onward)
        return any(swallows(guard) and not encloses(guard, line) for guard in guards)

    def _for_what_is_read(self, onward: list[Station]) -> bool:
        named = (caught_by(self.graph.ops[later.node].at) for later in onward)
        return any(caught is not None and AFTER_OPENING.search(caught) for caught in named)

    def _asserted_away(self, path: list[Station], site: int) -> bool:
        """`assert pool.alloc(n) is None`: the acquire is expected to fail. What a constructor asserts of what
        it is told says what cannot be, and whoever tells it otherwise goes no further."""
        line = self.span(self.graph.ops[site].at).line
        raised = (self.graph.ops[station.node].at for station in path if station.edge is Edge.RAISE)
        born = self.function.name == "__init__"
        return any(isinstance(at, ast.Assert) and (born or self.span(at).line == line) for at in raised)

    def _broadly(self, onward: list[Station], line: int) -> bool:
        """Not a handler around the acquire too, of one named failure that calls before it were expected to
        raise."""
        guards = [self.graph.ops[later.node].at for later in onward]
        for handler in guards:
            caught = caught_by(handler)
            if caught is not None:
                around = any(swallows(guard) and encloses(guard, line) for guard in guards)
                return not around or BROAD.search(caught) is not None
        return True

    def _starts(self, path: list[Station]) -> bool:
        """Whether a task is started on the way, which a lock may be left to."""
        ops = (self.graph.ops[station.node] for station in path if station.edge not in RAISING)
        return any(isinstance(op, Call) and op.method in STARTING for op in ops)

    def _where(self, node: int, path: list[Station]) -> Span:
        op = self.graph.ops[node]
        if isinstance(op, Leave) and getattr(op.at, "lineno", None) is None:
            for station in reversed(path):
                if station.edge in RAISING:
                    return self.span(self.graph.ops[station.node].at)
        if isinstance(op, Leave) and not isinstance(op.at, (ast.Return,)):
            return self._end_of_function()
        return self.span(self._returning(path) or op.at if isinstance(op, Leave) else op.at)

    def _returning(self, path: list[Station]) -> ast.AST | None:
        """Returns out of one `with` or `try` have its end in common: which of them was it?"""
        passed = (self.graph.ops[station.node].at for station in reversed(path))
        return next((at for at in passed if isinstance(at, ast.Return)), None)

    def _end_of_function(self) -> Span:
        node = self.function.node
        last = node.body[-1] if isinstance(node.body, list) and node.body else node
        line, column = getattr(last, "end_lineno", 1) or 1, getattr(last, "end_col_offset", 0) or 0
        return Span(self.function.module.path, line, column, line, column + 1)

    def _trace(self, site: int, path: list[Station], loss: Loss, at: Span) -> tuple[Step, ...]:
        first = self.span(self.graph.ops[site].at)
        file = self.function.module.path
        steps = [Step(file, first.line, first.column, "acquired here")]
        for step in tell(self.graph, file, path, self.function.module.lines):
            if step != steps[-1]:
                steps.append(step)
        steps.append(Step(file, at.line, at.column, LAST_WORDS[loss]))
        return tuple(steps)

    def _failed(self, path: list[Station], site: int) -> str | None:
        """The other acquire whose failing branch the path takes."""
        if any(
            isinstance(self.graph.ops[station.node].at, ast.Assert) and station.edge is Edge.RAISE
            for station in path
        ):
            return None  # an assertion states what cannot happen
        for index, station in enumerate(path):
            op = self.graph.ops[station.node]
            if isinstance(op, Assume) and op.subject is not None and op.says_absent:
                text, call = self._acquired().get(op.subject, (None, None))
                again = any(earlier.node == site for earlier in path[:index])
                if text is not None and (again or call is not self.graph.ops[site].at):
                    return text
            if station.edge in RAISING and (beside := self._gathered(op, site)):
                return beside
            if station.edge in RAISING and isinstance(op, Call) and (station.node != site or self._wants(op)):
                acquisition = self.effects.acquisition(op)
                if acquisition is not None and not acquisition.managed:
                    return acquisition.text
        return None

    def _spelled_out(self, path: list[Station]) -> bool:
        """Whether what fails raises in so many words what no handler here is for."""
        failing = (self.graph.ops[station.node].at for station in path if station.edge in RAISING)
        return all(isinstance(at, ast.Call) and self.effects.raises_past(at) for at in failing)

    def _for_want(self, path: list[Station], site: int) -> bool:
        """Whether the acquire that fails raises in so many words where it has nothing to lend."""
        raising = (self.graph.ops[station.node] for station in path if station.edge in RAISING)
        return all(self._wants(op) or self._gathered(op, site) for op in raising)

    def _gathered(self, op: Op, site: int) -> str:
        """The acquire that fails beside this one, or another of the same, in `gather(*(pool.take() ...))`."""
        begun = self.graph.ops[site].at
        known = self.effects.recogniser, self.function
        for call in (
            gathered_beside(op.at, begun) if isinstance(op, Call) and isinstance(begun, ast.Call) else ()
        ):
            acquired = next((o for o in self.graph.ops if isinstance(o, Call) and o.at is call), None)
            other = self.effects.acquisition(acquired) if acquired is not None else None
            if other is not None and raises_for_want(*known, call, other.protocol, gathered=True):
                return other.text
        return ""

    def _wants(self, op: Op) -> bool:
        acquisition = self.effects.acquisition(op) if isinstance(op, Call) else None
        known = self.effects.recogniser, self.function
        return (
            isinstance(op, Call)
            and acquisition is not None
            and raises_for_want(*known, op.at, acquisition.protocol)
        )

    def _acquired(self) -> dict[Path, tuple[str, ast.Call]]:
        """Names and fields bound from acquire calls, with the callee and the call."""
        if self._acquired_names is None:
            names: dict[Path, tuple[str, ast.Call]] = {}
            for op in self.graph.ops:
                if isinstance(op, Call):
                    acquisition = self.effects.acquisition(op)
                    if acquisition is not None:
                        names[op.target] = acquisition.text, op.at
                elif isinstance(op, Move | Store) and op.source in names:
                    names[op.target] = names[op.source]
            self._acquired_names = names
        return self._acquired_names

    def span(self, node: ast.AST) -> Span:
        """Where a piece of the function stands."""
        return span_of(self.function.module.path, node, self.function.module.lines)


ORDINARY = frozenset({Loss.RETURN, Loss.FALL_THROUGH, Loss.NEXT_TURN, Loss.REBOUND})


def _is_meant_for(raised: Set[str], at: ast.AST) -> bool:
    """Whether it is no handler, or one for that."""
    named = caught_names(at) if isinstance(at, ast.ExceptHandler) else frozenset()
    return not named or not named.isdisjoint(raised | ALL)


IN_PASSING = frozenset({Loss.REBOUND, Loss.DELETED, Loss.OVERWRITTEN, Loss.DROPPED})
"""Losses that a `finally` can cause while an exception passes through it."""


def _given(call: Call, other: Call) -> bool:
    return any(path == other.target for path, _ in call.args)


def _name_of(held: Held) -> str:
    names = sorted("".join(place).lstrip("@") for place in held.places if not is_temporary(place))
    return names[0] if names else ""
