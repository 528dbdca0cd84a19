"""A lease that something else may still be using: a copy that was not waited for, another stream, a transfer
whose handle nobody has waited on."""

import ast
from dataclasses import dataclass, replace

from auditor.flow.aliases import Named, inside
from auditor.flow.effects import Value
from auditor.flow.handles import GATHERING, Handles, followed, places_of, waited_for
from auditor.flow.holders import held_in
from auditor.flow.misuse import Uses
from auditor.flow.operands import operands
from auditor.flow.until_release import UntilRelease
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    RAISING,
    Assume,
    Call,
    Edge,
    Enter,
    Exit,
    Fresh,
    InPlace,
    Leave,
    Next,
    Op,
    Path,
    Store,
)
from auditor.protocols.tensor_accesses import Access, access_of

COPYING = frozenset({"copy_", "to", "cuda", "cpu"})
SENDING = frozenset({"isend", "irecv", "batch_isend_irecv"})
WAITING = frozenset(
    {"synchronize", "wait_stream", "wait_event", "record_stream", "barrier", "query", "wait_all"}
)
"""After these nothing that was begun before counts as unfinished."""

READING = frozenset({"item", "tolist", "numpy"})
"""These wait for the values, and so for copies, but for no transfer that only reads them."""


@dataclass(frozen=True, slots=True)
class Flight(Named):
    """`begun` are nodes that began something unfinished, `handles` the places of its handles; `streams`
    are contexts that run on another stream."""

    begun: frozenset[tuple[int, str]] = frozenset()
    handles: Handles = frozenset()
    streams: tuple[Path, ...] = ()


class InFlight(UntilRelease):
    """The step function. `unfinished` are releases at which something is still under way."""

    def __init__(self, graph: Graph, uses: Uses, protocol: str, exits: Path | None = None) -> None:
        super().__init__(graph, uses, protocol, exits)
        self.unfinished: list[tuple[int, Flight]] = []

    def step(self, node: int, state: Flight, edge: Edge) -> tuple[Flight, ...]:
        op = self.graph.ops[node]
        if isinstance(op, Leave):
            return ()
        if self._releases(op, state):
            if state.begun and edge not in RAISING and (node, state) not in self.unfinished:
                self.unfinished.append((node, state))
            return ()
        if edge in RAISING:
            return (state,)
        places = places_of(state.handles)
        if isinstance(op, Assume) and op.subject in places and op.says_absent:
            return ()  # without a handle nothing was begun
        if isinstance(op, Next) and edge is Edge.EXHAUSTED and held_in(places, op.source):
            return ()  # a loop over handles meets each of them
        after = self.aliases.after(node, op, state, edge)
        if after is None or not after.aliases:
            return ()
        after = replace(after, handles=followed(after.handles, op))
        return (self._progress(node, op, state, after),)

    def _progress(self, node: int, op: Op, before: Flight, after: Flight) -> Flight:
        """What begins here, and what is waited for."""
        if isinstance(op, Enter) and _is_stream(op.at):
            return replace(after, streams=(*after.streams, op.context))
        if isinstance(op, Exit):
            return replace(after, streams=tuple(s for s in after.streams if s != op.context))
        if isinstance(op, Call):
            after = self._called(node, op, before, after)
        if after.streams and self._touches(op, before):
            after = replace(after, begun=after.begun | {(node, "stream")})
        return after

    def _called(self, node: int, call: Call, before: Flight, after: Flight) -> Flight:
        if call.method in WAITING or self._given_handle(call, before):
            return replace(after, begun=frozenset(), handles=frozenset())  # who has a handle may wait
        if call.method in READING:
            return replace(after, begun=frozenset(b for b in after.begun if b[1] == "transfer"))
        if call.method == "wait" and call.receiver is not None:
            return _waited(_counted(call.at, call.receiver), before, after)
        if not self._is_given(call, before):
            return after
        if call.method in COPYING and _says(call.at, "non_blocking"):
            return replace(after, begun=after.begun | {(node, "copy")})
        if call.method in SENDING or (_says(call.at, "async_op") and call.method not in COPYING):
            begun = after.begun | {(node, "transfer")}
            return replace(after, begun=begun, handles=after.handles | {(node, call.target)})
        if call.method == "P2POp":
            return replace(after, aliases=after.aliases | {((*call.target, "[0]"), False)})
        return after

    def _given_handle(self, call: Call, state: Flight) -> bool:
        if call.method in GATHERING or call.method in ("is_completed", "isinstance", "len"):
            return False
        places = places_of(state.handles)
        return any(position != -1 and held_in(places, path) for position, path in operands(call))

    def _is_given(self, call: Call, state: Flight) -> bool:
        return any(inside(state.aliases, path, Value.TENSOR) is not None for _, path in operands(call))

    def _touches(self, op: Op, state: Flight) -> bool:
        """Whether the operation reads or writes the lease, here on another stream."""
        match op:
            case Call():
                return access_of(op.method) not in (None, Access.NEUTRAL) and self._is_given(op, state)
            case Fresh(at=ast.BinOp() | ast.UnaryOp(), uses=uses):
                return any(inside(state.aliases, path, Value.TENSOR) is not None for path in uses)
            case InPlace(target=target, operand=operand):
                return any(
                    inside(state.aliases, path, Value.TENSOR) is not None for path in (target, operand)
                )
            case Store(target=target, sliced=True):
                return inside(state.aliases, target[:-1], Value.TENSOR) is not None
        return False


def _waited(receiver: Path, before: Flight, after: Flight) -> Flight:
    """`receiver.wait()`: of several transfers those end whose handle it is; where none is known, all."""
    if not before.handles:
        return replace(after, begun=frozenset())
    ended = waited_for(before.handles, receiver)
    if not ended:
        return after
    return replace(
        after,
        begun=frozenset(b for b in after.begun if b[1] == "transfer" and b[0] not in ended),
        handles=frozenset(handle for handle in after.handles if handle[0] not in ended),
    )


def _counted(at: ast.Call, receiver: Path) -> Path:
    """`handles[-1]` with its number: counting from the end is a computed item to everybody else."""
    match at.func:
        case ast.Attribute(
            value=ast.Subscript(slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))))
        ):
            return (*receiver[:-1], f"[-{number}]")
    return receiver


def _is_stream(at: ast.AST) -> bool:
    if not isinstance(at, ast.Call):
        return False
    name = at.func.attr if isinstance(at.func, ast.Attribute) else getattr(at.func, "id", "")
    return name in ("stream", "StreamContext") and bool(at.args)


def _says(call: ast.Call, name: str) -> bool:
    return any(
        key.arg == name and isinstance(key.value, ast.Constant) and key.value.value is True
        for key in call.keywords
    )
