"""A lease that something else may still be using: a copy that was not waited for, another stream, a transfer
whose handle nobody has waited on."""

import ast
from dataclasses import dataclass, replace

from auditor.flow.aliases import Named, inside
from auditor.flow.effects import Value
from auditor.flow.holders import bound, held_in, moved
from auditor.flow.misuse import Uses
from auditor.flow.passing import operands
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
    {"synchronize", "wait_stream", "wait_event", "record_stream", "barrier", "item", "tolist", "numpy",
     "query", "wait_all"}
)  # fmt: skip
"""After these nothing that was begun before counts as unfinished; `item` and its kin wait for the values."""


@dataclass(frozen=True, slots=True)
class Flight(Named):
    """`begun` are nodes that began something unfinished, with the places of its handle; `streams` are
    contexts that run on another stream."""

    begun: frozenset[tuple[int, str]] = frozenset()
    handles: frozenset[Path] = frozenset()
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
        if isinstance(op, Assume) and op.subject in state.handles and (op.kind != "truth") == op.value:
            return ()  # without a handle nothing was begun
        if isinstance(op, Next) and edge is Edge.EXHAUSTED and held_in(state.handles, op.source):
            return ()  # a loop over handles meets each of them
        after = self.aliases.after(node, op, state, edge)
        if after is None or not after.aliases:
            return ()
        after = replace(after, handles=moved(after.handles, op))
        return (self._progress(node, op, state, after),)

    def _progress(self, node: int, op: Op, before: Flight, after: Flight) -> Flight:
        """What begins here, and what is waited for."""
        if isinstance(op, Enter) and _is_stream(op.at):
            return replace(after, streams=(*after.streams, op.context))
        if isinstance(op, Exit):
            return replace(after, streams=tuple(s for s in after.streams if s != op.context))
        if isinstance(op, Call):
            after = replace(after, handles=bound(after.handles, op.target, False))
            after = self._called(node, op, before, after)
        if after.streams and self._touches(op, before):
            after = replace(after, begun=after.begun | {(node, "stream")})
        return after

    def _called(self, node: int, call: Call, before: Flight, after: Flight) -> Flight:
        if call.method in WAITING:
            return replace(after, begun=frozenset(), handles=frozenset())
        if call.method == "wait" and call.receiver is not None:
            waited = held_in(before.handles, call.receiver) or not before.handles
            return replace(after, begun=frozenset(), handles=frozenset()) if waited else after
        if self._given_handle(call, before):
            return replace(after, begun=frozenset(), handles=frozenset())  # who has it may wait
        if not self._is_given(call, before):
            return after
        if call.method in COPYING and _says(call.at, "non_blocking"):
            return replace(after, begun=after.begun | {(node, "copy")})
        if call.method in SENDING or (_says(call.at, "async_op") and call.method not in COPYING):
            begun = after.begun | {(node, "transfer")}
            return replace(after, begun=begun, handles=after.handles | {call.target})
        if call.method == "P2POp":
            return replace(after, aliases=after.aliases | {((*call.target, "[0]"), False)})
        return after

    def _given_handle(self, call: Call, state: Flight) -> bool:
        if call.method in ("append", "extend", "is_completed", "isinstance", "len"):
            return False
        return any(position != -1 and held_in(state.handles, path) for position, path in operands(call))

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
