"""A lease that was handed out uncleared, until somebody writes it: whether it is read before.

Loops over something are taken to turn at least once: an empty batch makes no buffer unwritten."""

import ast
from dataclasses import dataclass, replace

from auditor.flow.aliases import Aliases, Named, inside
from auditor.flow.effects import Value
from auditor.flow.misuse import Uses
from auditor.flow.operands import operands
from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Call, Edge, Fresh, InPlace, Leave, Next, Op, Path, Store, Yield
from auditor.protocols.tensor_accesses import Access, access_of

DISTRIBUTED = frozenset({"all_reduce", "reduce", "broadcast", "recv", "irecv", "all_gather", "scatter"})


@dataclass(frozen=True, slots=True)
class Waiting(Named):
    """`turned` are loops that have run a turn."""

    turned: frozenset[int] = frozenset()


class Unwritten:
    """The step function. A read is noted, and ends the path as a write does: only the first one counts."""

    def __init__(self, graph: Graph, uses: Uses, protocol: str) -> None:
        self.graph = graph
        self.uses = uses
        self.aliases = Aliases(graph, uses, Value.TENSOR, protocol)
        self.reads: list[tuple[int, Waiting]] = []

    def step(self, node: int, named: Waiting, edge: Edge) -> tuple[Waiting, ...]:
        op = self.graph.ops[node]
        if isinstance(op, Leave):
            return ()
        access = self._access(op, named)
        if access is Access.READ and edge not in RAISING and (node, named) not in self.reads:
            self.reads.append((node, named))
        if access in (Access.READ, Access.OVERWRITE):
            return ()
        if isinstance(op, Next) and edge is Edge.EXHAUSTED and node not in named.turned:
            return ()
        after = self.aliases.after(node, op, named, edge)
        if after is None or not after.aliases:
            return ()
        return (replace(after, turned=after.turned | {node}) if isinstance(op, Next) else after,)

    def _access(self, op: Op, named: Named) -> Access | None:
        """OVERWRITE stands also for whatever may write it, or lets others do so."""
        match op:
            case Call():
                return self._called(op, named)
            case Fresh(at=ast.BinOp() | ast.UnaryOp(), uses=paths) if any(self._is(p, named) for p in paths):
                return Access.READ
            case InPlace() if self._is(op.target, named) or self._is(op.operand, named):
                return Access.READ
            case Next(source=source) if self._is(source, named):
                return Access.OVERWRITE
            case Yield(source=source) if source is not None and inside(named.aliases, source, Value.TENSOR):
                return Access.OVERWRITE
            case Store():
                return self._stored(op, named)
        return None

    def _is(self, operand: Path, named: Named) -> bool:
        found = inside(named.aliases, operand, Value.TENSOR)
        return found is not None and found[0] == ()

    def _stored(self, op: Store, named: Named) -> Access | None:
        if op.target[-1].startswith("[") and len(op.target) > 1 and self._is(op.target[:-1], named):
            return Access.OVERWRITE
        if inside(named.aliases, op.source, Value.TENSOR) is None:
            return None
        return Access.READ if op.sliced else Access.OVERWRITE

    def _called(self, call: Call, named: Named) -> Access | None:
        """The first thing that a call does to it; of unknown calls, that they write it."""
        found = None
        for position, operand in operands(call):
            lies = inside(named.aliases, operand, Value.TENSOR)
            if lies is None:
                continue
            access = self._operand(call, position, lies[0])
            if access is Access.OVERWRITE:
                return access
            found = access or found
        return found

    def _operand(self, call: Call, position: int | str, rest: Path) -> Access | None:
        dotted = self.uses.dotted(call)
        known = access_of(call.method)
        if position == "out" or call.method in DISTRIBUTED or "distributed" in (dotted or ""):
            return Access.OVERWRITE
        if rest:
            return Access.READ if known is Access.READ and _of_torch(dotted) else Access.OVERWRITE
        if call.is_told_where and known is None:
            return Access.OVERWRITE
        treatment = self.aliases.treatment(call, position, rest)
        if known is None and treatment.result == () and not treatment.maybe:
            return None  # a view
        if known is Access.NEUTRAL:
            return None
        first = position == (-1 if is_method(call) else 0)
        if known is Access.OVERWRITE:
            return Access.OVERWRITE if first else Access.READ
        if known is Access.READ and (call.receiver is not None or _of_torch(dotted)):
            return Access.READ
        return None if call.method in HARMLESS else Access.OVERWRITE


def is_method(call: Call) -> bool:
    """Called on a tensor, not on a module such as `torch`."""
    return call.receiver is not None and not call.receiver[0].startswith("@")


HARMLESS = frozenset({"len", "isinstance", "print", "id", "type", "hasattr", "is_tensor", "debug", "info"})


def _of_torch(dotted: str | None) -> bool:
    return dotted is not None and dotted.startswith("torch.")
