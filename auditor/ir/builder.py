"""Grows a flow graph: open ends, jumps out of nested frames, and the raising edges that leave every call.

A `finally` body is copied once for each kind of way out that runs through it, so that the analysis never
confuses a return with an exception. The copies are made when first needed and shared afterwards."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from auditor.ir.graph import Graph
from auditor.ir.handlers import CALL, EXIT, LOOKUPS, UNKNOWN, Handler, Raised
from auditor.ir.ops import Edge, Exit, Leave, Nop, Op, Path, Way

End = tuple[int, Edge]
Reason = str | tuple[str, Raised]
"""Why a cleanup runs; it is copied once for each reason."""


@dataclass(slots=True)
class LoopFrame:
    """`own`: the test for a process's own turn, its answer there, and the flag that says the turn was met.
    `further`: what answers in a turn that another one follows, and the flag that says so."""

    head: int
    own: tuple[ast.If, bool, Path] | None = None
    further: tuple[dict[str, bool], Path] | None = None
    breaks: list[End] = field(default_factory=list)


@dataclass(slots=True)
class CleanupFrame:
    """Something that runs on the way out: a `finally` body, or the `__exit__` of a `with`."""

    at: ast.AST
    lower: Callable[[], None]
    copies: dict[Reason, int] = field(default_factory=dict)
    suppressed: list[End] | None = None  # `contextlib.suppress`: exceptions end here
    suppresses: tuple[str, ...] = ()


@dataclass(slots=True)
class HandlerFrame:
    """The handlers of a `try` whose body is being lowered."""

    at: ast.AST
    handlers: list[Handler]
    dispatchers: dict[Raised, int] = field(default_factory=dict)


Frame = LoopFrame | CleanupFrame | HandlerFrame


class Builder:
    """Holds the graph, the open ends that the next operation continues from, and the frames around it."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.ends: list[End] = []
        self.frames: list[Frame] = []
        self.temporaries = 0
        self._raise_leaves: dict[str, int] = {}

    def temporary(self) -> Path:
        self.temporaries += 1
        return (f"%{self.temporaries}",)

    def emit(self, op: Op) -> int:
        """Append an operation after all open ends. Unreachable code gets a node nobody leads to."""
        node = self.graph.add(op)
        for source, edge in self.ends:
            self.graph.connect(source, node, edge)
        self.ends = [(node, Edge.NORMAL)]
        return node

    def emit_raising(self, op: Op, edge: Edge = Edge.CALL_RAISES, exception: Raised = CALL) -> int:
        node = self.emit(op)
        self.graph.connect(node, self.raise_target(exception), edge)
        return node

    def emit_interruptible(self, op: Op, edge: Edge) -> int:
        """An await or a yield: it may raise, and the caller may cancel, close or throw in here."""
        node = self.emit_raising(op, Edge.CLOSE if edge is Edge.CLOSE else Edge.CALL_RAISES)
        self.graph.connect(node, self.raise_target(EXIT), edge)
        return node

    def emit_lookup(self, op: Op) -> int:
        """What `table[key]` raises counts where a handler around it names that."""
        expected = self.expected_lookup
        return self.emit(op) if expected is None else self.emit_raising(op, exception=expected)

    @property
    def expected_lookup(self) -> Raised | None:
        """What some handler around here expects of `table[key]`."""
        frames = (frame for frame in self.frames if isinstance(frame, HandlerFrame))
        names = [name for frame in frames for each in frame.handlers for name in each.names or ()]
        return next((Raised(name) for name in names if name in LOOKUPS), None)

    @property
    def reachable(self) -> bool:
        return bool(self.ends)

    # Raising ------------------------------------------------------------------------------------------------

    def raise_target(self, exception: Raised) -> int:
        """Where control goes when `exception` is raised inside the present frames."""
        return self._raise_from(len(self.frames), exception)

    def _raise_from(self, depth: int, exception: Raised) -> int:
        for index in range(depth - 1, -1, -1):
            frame = self.frames[index]
            if isinstance(frame, HandlerFrame):
                return self._dispatcher(index, frame, exception)
            if isinstance(frame, CleanupFrame):
                return self._cleanup_then_raise(index, frame, exception)
        kind = exception.name if exception.name in (CALL.name, EXIT.name) else UNKNOWN.name
        if kind not in self._raise_leaves:
            self._raise_leaves[kind] = self.graph.add(Leave(ast.Pass(), Way.RAISE))
        return self._raise_leaves[kind]

    def _dispatcher(self, index: int, frame: HandlerFrame, exception: Raised) -> int:
        if exception not in frame.dispatchers:
            node = self.graph.add(Nop(frame.at))
            frame.dispatchers[exception] = node
            uncaught = exception
            for handler in frame.handlers:
                caught = handler.catches(uncaught)
                if caught is not False:
                    self.graph.connect(node, handler.entry, Edge.NORMAL)
                if caught is True:
                    break
                uncaught = uncaught.past(handler)
            else:
                self.graph.connect(node, self._raise_from(index, uncaught), Edge.NORMAL)
        return frame.dispatchers[exception]

    def _cleanup_then_raise(self, index: int, frame: CleanupFrame, exception: Raised) -> int:
        if frame.suppressed is not None and exception != EXIT:
            return self._perhaps_suppressed(index, frame, exception)
        return self._raise_through(index, frame, exception)

    def _perhaps_suppressed(self, index: int, frame: CleanupFrame, exception: Raised) -> int:
        """`contextlib.suppress(KeyError)` ends some exceptions; which ones a call raises is not known."""
        caught = Handler(-1, frame.suppresses).catches(exception)
        if caught is True:
            return self._suppressed(index, frame)
        if caught is False:
            return self._raise_through(index, frame, exception)
        key = ("either", exception)
        if key not in frame.copies:
            node = frame.copies[key] = self.graph.add(Nop(ast.Pass()))
            self.graph.connect(node, self._suppressed(index, frame), Edge.NORMAL)
            self.graph.connect(node, self._raise_through(index, frame, exception), Edge.NORMAL)
        return frame.copies[key]

    def _raise_through(self, index: int, frame: CleanupFrame, exception: Raised) -> int:
        key = ("raise", exception)
        if key not in frame.copies:
            ends = self._copy(index, frame, key)
            if ends:
                target = self._raise_from(index, exception)
                for source, edge in ends:
                    self.graph.connect(source, target, edge)
        return frame.copies[key]

    def _suppressed(self, index: int, frame: CleanupFrame) -> int:
        assert frame.suppressed is not None
        if "suppressed" not in frame.copies:
            frame.suppressed.extend(self._copy(index, frame, "suppressed"))
        return frame.copies["suppressed"]

    def _copy(self, index: int, frame: CleanupFrame, key: Reason) -> list[End]:
        """Lower one copy of a cleanup as seen from outside its frame; returns its open ends."""
        saved_ends, saved_frames = self.ends, self.frames
        self.frames = self.frames[:index]
        frame.copies[key] = self.graph.add(Nop(frame.at))
        self.ends = [(frame.copies[key], Edge.NORMAL)]
        frame.lower()
        ends = self.ends
        self.ends, self.frames = saved_ends, saved_frames
        return ends

    # Leaving ------------------------------------------------------------------------------------------------

    def leave(self, op: Leave) -> None:
        """Return or fall through: run every cleanup on the way, innermost first. One that answers `True` and
        one that answers `False` have no cleanup in common: it matters which of them it was."""
        answer = getattr(op.at, "value", None)
        told = f" {answer.value!r}" if isinstance(answer, ast.Constant) else ""
        self._unwind(0, f"leave {op.way.name}{told}")
        if self.reachable:
            self.emit(op)
        self.ends = []

    def jump(self, kind: str) -> None:
        """break or continue."""
        for index in range(len(self.frames) - 1, -1, -1):
            frame = self.frames[index]
            if isinstance(frame, LoopFrame):
                self._unwind(index + 1, f"{kind} {frame.head}")
                if kind == "break":
                    frame.breaks.extend(self.ends)
                else:
                    self.close_loop(frame.head)
                break
        self.ends = []

    def close_loop(self, head: int) -> None:
        for source, edge in self.ends:
            self.graph.connect(source, head, edge)

    def _unwind(self, down_to: int, key: Reason) -> None:
        for index in range(len(self.frames) - 1, down_to - 1, -1):
            frame = self.frames[index]
            if not isinstance(frame, CleanupFrame):
                continue
            seen = frame.copies.get(key)
            if seen is not None:
                for source, edge in self.ends:
                    self.graph.connect(source, seen, edge)
                self.ends = []
                return
            incoming = self.ends
            ends = self._copy(index, frame, key)
            for source, edge in incoming:
                self.graph.connect(source, frame.copies[key], edge)
            self.ends = ends
            if not ends:
                return


def exit_of(builder: Builder, at: ast.AST, context: Path, interruptible: bool) -> Callable[[], None]:
    """The cleanup of one `with` item."""

    def lower() -> None:
        if interruptible:
            builder.emit_interruptible(Exit(at, context), Edge.CANCEL)
        else:
            builder.emit(Exit(at, context))

    return lower
