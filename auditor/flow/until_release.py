"""A tensor's lease followed up to the call, or the end of the `with`, that gives it back."""

from auditor.flow.aliases import Aliases, Named, inside
from auditor.flow.effects import Value
from auditor.flow.misuse import Uses
from auditor.flow.operands import operands
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Exit, Op, Path


class UntilRelease:
    """What the domains share whose question is asked at the release. `exits` is the `with` that releases."""

    def __init__(self, graph: Graph, uses: Uses, protocol: str, exits: Path | None = None) -> None:
        self.graph = graph
        self.uses = uses
        self.protocol = protocol
        self.exits = exits
        self.aliases = Aliases(graph, uses, Value.TENSOR, protocol)

    def _releases(self, op: Op, state: Named) -> bool:
        if isinstance(op, Exit):
            return op.context == self.exits
        if not isinstance(op, Call):
            return False
        for position, operand in operands(op):
            found = inside(state.aliases, operand, Value.TENSOR)
            if found and self.uses.release(op, position, found[0], Value.TENSOR, self.protocol):
                return True
        return False
